"""Reports of synthetic rows: figures, tables, pictures, and two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.report.rows import ROWS, SCHEMA, Key, Line, append, read_answers, read_record
from eval.report.steps import bounds
from eval.report.summary import summary
from eval.report.tables import verdict
from eval.runs.asked import Asked

METHODS = ("stock", "selfspec", "other")
ASKED = {"max_new_tokens": 8, "temperature": 0.3, "shape": "135m", "knobs": {"top_k": 4}}
SETTINGS = {
    **Asked(model="m", bench="b", output=Path(), methods=METHODS, **ASKED).settings(),
    "dtype": "float32",
    "questions_sha256": "aa",
}
NAMES = ("selfspec", "torch", "transformers", "python", "attention")
ENVIRONMENT = dict.fromkeys(NAMES, "1") | {
    "machine": "a | b",
    "threads": 2,
    "git_commit": None,
    "git_dirty": False,
}


def numbers(seconds: float, **more: Any) -> Line:
    about = {"num_prompt_tokens": 4, "num_new_tokens": 9, "prefill_seconds": 0.1, "num_steps": 8}
    return {"seconds": seconds, **about, "output_sha256": "x", **more}


def ours(seconds: float, **more: Any) -> Line:
    counts = {
        "num_steps": 4,
        "num_nodes": 40,
        "accepted_lengths": {0: 1, 2: 2, 40: 1},
        "widths": {1: 1, 13: 3},
        "drafted_by_source": {"lut": 9},
        "accepted_by_source": {"lut": 4, "<odd>": 1},
        "stage_seconds": {"prefill": 0.1, "forward": seconds / 2, "new stage": 0.01},
        "same": "identical",
    }
    return numbers(seconds, **{**counts, **more})


def answer(question: int, method: str, task: str, **what: Any) -> Line:
    about = {"run": "r", "turn": 0, "order": 0, "task": task, "method": method, **what}
    return {"kind": "answer", "question": question, "round": 0, **about}


def all_lines(selfspec: float = 1.0, **settings: Any) -> list[Line]:
    """Two questions of different tasks; `other` fails on the second."""
    about = {"environment": ENVIRONMENT, "notes": ["2 questions of b"], "schema": SCHEMA}
    about |= {"num_asked": 2, "left_out": {}}
    curve = {"widths": [1, 2, 64], "seconds": [0.01, 0.01, 0.03], "num_columns": 90}
    lines = [{"kind": "run", "settings": {**SETTINGS, **settings}, **about}]
    for question, task in ((1, "qa"), (2, "<math>")):
        same = ("identical", "near-tie")[question - 1]
        other = {"numbers": ours(1.5)} if question == 1 else {"error": "broken <here>"}
        lines += [
            answer(question, "stock", task, numbers=numbers(2.0)),
            answer(question, "selfspec", task, numbers=ours(selfspec * question, same=same)),
            answer(question, "other", task, **other),
        ]
    return [*lines, {"kind": "curve", **curve}]


def folder(path: Path, selfspec: float = 1.0, **settings: Any) -> str:
    append(path / ROWS, all_lines(selfspec, **settings))
    return str(path)


def test_a_report_says_what_was_measured_where_others_win_and_what_failed(told, tmp_path):
    asked = ["report", folder(tmp_path, selfspec=1.2), "--pictures", str(tmp_path / "pictures")]
    assert told(*asked)[0] == 0
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# m grown to 135m on b, cold\n")
    for part in (
        "- decoding: T = 0.3, 8 new tokens at most",
        "- knobs: top_k = 4",
        "; 2 answers of each\n",
        "| selfspec | 1.11x |",
        "\n\nselfspec ran at 1.11x the speed of stock generate() (",
        "1 of 2 + 1 near-ties |",
        "- other, 1 answers: broken <here>",
        "- overall, speed-up: other 1.33x, selfspec 1.11x",
        "| plain steps | 1.00 | 1.00 | 3.00 |",
        "| overall | other | 1 (1 failed) | 9 |",
        "Bound, decoding alone, every draft right: 21.33x at width 64 within 64 nodes.",
    ):
        assert part in text
    assert "| <math> | other |" not in text  # A single answer is no row.
    page = (tmp_path / "report.html").read_text()
    drawn = [path.read_text() for path in (tmp_path / "pictures").glob("*.svg")]
    assert page.count("</svg>") == len(drawn) == 6
    assert "<math>" not in page.replace("<!-- <math> -->", "")
    said = "".join(drawn)  # Letters are drawn as shapes; what they say stands in comments.
    for name in ("speed-up over stock (times)", "milliseconds per new token", "time (plain steps)"):
        assert f"<!-- {name} -->" in said


def test_times_of_a_busy_machine_are_left_out(told, tmp_path):
    lines = all_lines(selfspec=0.5)
    for line in lines:
        if "numbers" in line:
            line["numbers"]["processor_share"] = 0.5
    append(tmp_path / ROWS, lines)
    assert told("report", str(tmp_path))[0] == 0
    text = (tmp_path / "report.md").read_text()
    assert "\n\nThe machine was busy: other programs left 50% of the processor, so times" in text
    for time in ("x |", "x the speed", "ms a token", "tokens/s"):
        assert time not in text, time
    assert "2.00 (10)" in text  # Tokens per step, and nodes.
    left, right = folder(tmp_path / "a"), str(tmp_path)
    _, said, _ = told("compare", left, right)
    assert "x |" not in "\n".join(said)


def test_the_best_of_the_others_is_none_of_ours_and_a_bound_was_measured(tmp_path):
    """Without drafts selfspec is no other method, and no width that nobody ran sets a bound."""
    lines = all_lines()
    for line in lines:
        if line["kind"] == "curve":
            line |= {"widths": [1, 2], "seconds": [0.01, 0.01]}
        elif line["kind"] == "run":
            line["settings"] = {
                **line["settings"],
                "methods": ["stock", "selfspec", "forward-only", "other"],
            }
    faster = [
        answer(n, "forward-only", t, numbers=ours(0.9)) for n, t in ((1, "qa"), (2, "<math>"))
    ]
    append(tmp_path / ROWS, [*lines, *faster])
    figures = summary(read_answers(tmp_path))
    assert "The best of the others, other: " in verdict(figures)
    assert list(bounds(figures)) == [2]


def test_two_runs_are_compared_question_by_question(told, tmp_path):
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b", 0.5, max_new_tokens=16)
    text = "\n".join(told("compare", first, second)[1])
    assert "- max_new_tokens: 8 / 16" in text
    assert "| stock | overall | 2 | 1.00 / 1.00 | – / – | 1.00x | 1.00 to 1.00 | 2 of 2 |" in text
    assert "| selfspec | overall | 2 | 2.00 / 2.00 | 1.33x / 2.67x | 2.00x |" in text
    assert "| other | <math> | 0 |" in text
    assert "asked and measured alike" in "\n".join(told("compare", first, first)[1])
    for other, said in (
        (folder(tmp_path / "c", questions_sha256="bb"), "the same bench"),
        (str(tmp_path), "must be the --output of a run"),
    ):
        status, _, error = told("compare", first, other)
        assert (status, said in error) == (2, True)


def test_the_later_of_two_lines_with_one_key_counts_and_a_torn_one_does_not(tmp_path):
    path, first = tmp_path / ROWS, answer(1, "stock", "qa", error="out of memory")
    append(path, [first, answer(2, "stock", "qa"), {"kind": "not known yet"}])
    path.write_bytes(path.read_bytes() + b'{"kind": "ans')
    again = answer(1, "stock", "qa", numbers={"seconds": 0.5, "widths": {16: 3}})
    append(path, [again])
    record = read_record(tmp_path)
    assert list(record.answers) == [Key(1, 0, "stock", 0), Key(2, 0, "stock", 0)]
    row = record.frame.iloc[0]
    assert (row.seconds, row.widths, row.accepted_lengths) == (0.5, {16: 3}, {})
