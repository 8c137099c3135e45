"""The file of rows: what a kill leaves, what is refused, and that nothing is ever rewritten."""

from __future__ import annotations

import json

import pytest

from eval.errors import EvalError
from eval.journal import Journal

SETTINGS = {"model": "m", "max_nodes": 16, "versions": ("a", "b")}
ROWS = [{"id": n, "answers": {}} for n in range(3)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    journal = Journal(path, SETTINGS)
    for row in ROWS:
        journal.append(row)
    assert journal.rows == ROWS
    return path


def test_rows_are_there_again(path):
    assert Journal(path, SETTINGS).rows == ROWS
    assert json.loads(path.read_text().splitlines()[0]) == {
        "settings": {"model": "m", "max_nodes": 16, "versions": ["a", "b"]}
    }


def test_every_place_a_kill_may_stop_at(path):
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        journal = Journal(path, SETTINGS)
        assert journal.rows == ROWS[: max(content[:end].count(b"\n") - 1, 0)]
        assert path.read_bytes() == content[: max(content.rfind(b"\n", 0, end) + 1, first)]
        journal.append({"id": 9, "answers": {}})
        assert Journal(path, SETTINGS).rows[-1] == {"id": 9, "answers": {}}


def test_other_settings_are_refused_by_name(path):
    before = path.read_bytes()
    with pytest.raises(EvalError, match=r"max_nodes 16 \(now 8\), new None \(now 1\); go on with"):
        Journal(path, {**SETTINGS, "max_nodes": 8, "new": 1})
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["{", "[1]", '{"id": 1}', "text"])
def test_a_line_that_is_no_row_is_named(path, line):
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EvalError, match="line 3 must be a JSON object with 'answers'"):
        Journal(path, SETTINGS)


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n")
    with pytest.raises(EvalError, match="line 1 must be a JSON object with 'settings'"):
        Journal(path, SETTINGS)
    assert path.read_text() == "buy milk\n"


def test_without_a_path_nothing_is_kept():
    journal = Journal(None, SETTINGS)
    journal.append(ROWS[0])
    assert journal.rows == ROWS[:1]
