"""The file of rows: whole lines or none, the later of two with one key, and nothing of others."""

from __future__ import annotations

import json
import resource
import signal
from contextlib import contextmanager

import pytest

from eval.errors import EvalError
from eval.report.rows import ROWS, Answer, Key, Numbers, RowFile, read_record, shard_path
from eval.runs.environment import check_same

NUMBERS = Numbers(
    num_prompt_tokens=5,
    num_new_tokens=8,
    seconds=0.5,
    prefill_seconds=0.1,
    num_steps=3,
    output_sha256="ab",
    accepted_lengths={0: 1, 2: 2},
    widths={16: 3},
)


def answer(question: int | str = 1, method: str = "stock", **more) -> Answer:
    about = {"run": "r", "task": "qa", "turn": 0, "order": 0, **more}
    return Answer(method=method, questions=(question,), **about)


@contextmanager
def no_room_beyond(size: int):
    """The disk is full once a file is that long."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_was_appended_is_read_again(tmp_path):
    given = [answer(numbers=NUMBERS), answer("x", "ours", error="broken"), answer(numbers=NUMBERS)]
    RowFile(tmp_path / ROWS).append([each.as_line() for each in given])
    record = read_record(tmp_path)
    assert list(record.answers.values()) == [given[0], given[1]]
    assert list(record.answers) == [Key((1,), 0, "stock"), Key(("x",), 0, "ours")]
    assert "numbers" not in given[1].as_line()
    assert "error" not in given[0].as_line()


def test_the_later_of_two_lines_with_one_key_counts(tmp_path):
    file = RowFile(tmp_path / ROWS)
    file.append([answer(error="out of memory").as_line()])
    file.append([answer(numbers=NUMBERS).as_line()])
    assert read_record(tmp_path).answers[answer().key].numbers == NUMBERS


def test_every_place_a_kill_may_stop_at(tmp_path):
    path = tmp_path / "any.jsonl"
    RowFile(path).append([answer(1, numbers=NUMBERS).as_line(), answer(2).as_line()])
    content = path.read_bytes()
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        assert len(read_record(path).answers) == content.count(b"\n", 0, end)
        RowFile(path).append([answer(9).as_line()])
        kept = content[: content.rfind(b"\n", 0, end) + 1]
        assert path.read_bytes().startswith(kept)
        known = [key.questions for key in read_record(path).answers]
        assert known == [*[(1,), (2,)][: kept.count(b"\n")], (9,)]


@pytest.mark.parametrize("line", ["{", "[]", '{"no": "kind"}', '{"kind": "answer"}'])
def test_a_broken_line_is_named_by_its_number(tmp_path, line):
    good = json.dumps(answer().as_line())
    (tmp_path / ROWS).write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(
        EvalError, match=r"rows.jsonl line 2 must be a line of a run .* take it out"
    ):
        read_record(tmp_path)


def test_lines_of_a_newer_schema_are_refused_and_unknown_kinds_passed_over(tmp_path):
    (tmp_path / ROWS).write_text('{"kind": "something else"}\n')
    assert read_record(tmp_path).answers == {}
    (tmp_path / ROWS).write_text('{"kind": "run", "schema": 99}\n')
    with pytest.raises(EvalError, match=r"schema must be <= 1 \(got 99\)"):
        read_record(tmp_path)


def test_a_full_disk_is_said_and_takes_nothing_away(tmp_path):
    file = RowFile(tmp_path / ROWS)
    file.append([answer(1).as_line()])
    (tmp_path / "file").write_text("")
    with pytest.raises(EvalError, match=r"must be writable .* choose another --output"):
        RowFile(tmp_path / "file" / ROWS)
    before = file.path.read_bytes()
    with (
        no_room_beyond(len(before) + 40),
        pytest.raises(
            EvalError, match=r"rows.jsonl must be writable .* make room and run the same"
        ),
    ):
        file.append([answer(2).as_line(), answer(3).as_line()])
    assert file.path.read_bytes() == before
    file.append([answer(2).as_line()])
    assert len(read_record(tmp_path).answers) == 2


def test_shards_write_apart_and_are_read_together(tmp_path):
    for rank in range(2):
        path = shard_path(tmp_path, rank, 2)
        RowFile(path).append([answer(rank).as_line()])
        assert path.name == f"rows.{rank}-of-2.jsonl"
    assert [key.questions for key in read_record(tmp_path).answers] == [(0,), (1,)]
    assert shard_path(tmp_path, 0, 1).name == ROWS


HEAD = {
    "settings": {"max_new_tokens": 128, "limit": 10, "batch_size": 1},
    "environment": {"torch": "2", "git_commit": "a"},
}


def head(**changes) -> dict:
    return {
        part: {name: changes.get(name, value) for name, value in values.items()}
        for part, values in HEAD.items()
    }


@pytest.mark.parametrize("change", [{"max_new_tokens": 64}, {"torch": "3"}])
def test_a_run_that_was_measured_otherwise_is_refused_by_name(tmp_path, change):
    (name,) = change
    with pytest.raises(EvalError, match=rf"{name} must be what it was .* choose another --output"):
        check_same(tmp_path, HEAD, head(**change))


def test_a_run_may_become_longer_but_for_batches(tmp_path):
    check_same(tmp_path, HEAD, head(limit=20, git_commit="b"))
    batched = head(batch_size=2)
    with pytest.raises(EvalError, match="limit must be what it was"):
        check_same(tmp_path, batched, head(batch_size=2, limit=20))
