"""The file of rows: the later of two lines with one key counts, and a torn line takes nothing."""

from __future__ import annotations

from eval.report.rows import ROWS, Key, append, read_record


def answer(question: int | str = 1, **more) -> dict:
    about = {"run": "r", "task": "qa", "turn": 0, "order": 0, "method": "stock", **more}
    return {"kind": "answer", "question": question, "round": 0, **about}


def test_the_later_of_two_lines_with_one_key_counts_and_a_torn_one_does_not(tmp_path):
    path = tmp_path / ROWS
    append(path, [answer(error="out of memory"), answer("x"), {"kind": "not known yet"}])
    path.write_bytes(path.read_bytes() + b'{"kind": "ans')
    append(path, [answer(numbers={"seconds": 0.5, "widths": {16: 3}})])
    record = read_record(tmp_path)
    assert list(record.answers) == [Key(1, 0, "stock", 0), Key("x", 0, "stock", 0)]
    row = record.frame.iloc[0]
    assert (row.seconds, row.widths, row.accepted_lengths) == (0.5, {16: 3}, {})
