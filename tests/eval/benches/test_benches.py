"""Benches: where questions come from, and what is said of a file that is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.benches.registry import BENCHES, Slice, load_bench, select, spread
from eval.benches.stdlib import stdlib_questions
from eval.errors import EvalError

GOOD = {"question_id": 1, "category": "qa", "turns": ["what?"]}


def write(path: Path, *lines: object) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: the row: Invalid JSON"),
        ({**GOOD, "turns": None}, "line 2: turns: .* array"),
        ({**GOOD, "turns": ["a", " "]}, r"line 2: turns\.1"),
        ({**GOOD, "category": 3}, "line 2: category: .* string"),
        ({**GOOD, "question_id": True}, "line 2: question_id"),
        (GOOD, r"line 2: an id must not come twice \(got 1\)"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path, line, message):
    path = write(tmp_path / "question.jsonl", GOOD, line)
    with pytest.raises(EvalError, match=message):
        load_bench("spec-bench", path)


def test_spec_bench_files_mt_bench_under_one_task_and_mt_bench_does_not(tmp_path):
    path = write(tmp_path / "q.jsonl", GOOD, "", {**GOOD, "question_id": 2, "category": "writing"})
    assert [q.task for q in load_bench("spec-bench", path).questions] == ["qa", "multi-turn"]
    assert [q.task for q in load_bench("mt-bench", path).questions] == ["qa", "writing"]


def test_a_file_of_ones_own_may_leave_out_what_is_not_needed(tmp_path):
    path = write(tmp_path / "mine.jsonl", {"prompt": "one"}, {"turns": ["a", "b"], "category": "x"})
    bench = load_bench(str(path))
    assert [(q.id, q.task, q.turns) for q in bench.questions] == [
        (1, "mine", ("one",)),
        (2, "x", ("a", "b")),
    ]
    with pytest.raises(EvalError, match=r"takes no --questions .* leave it out"):
        load_bench(str(path), path)


ROWS = {
    "mt-bench": {"prompt_id": 7, "category": "math", "prompt": ["1 + 1?", "and 2 + 2?"]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n"},
    "gsm8k": {"question": "How many?", "answer": "3"},
    "mbpp": {"task_id": 11, "text": "Write f.", "test_list": ["assert f(1) == 2"], "code": ""},
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_benches_of_the_hub_come_through_datasets_or_a_local_file(tmp_path, monkeypatch, name):
    asked = []

    def load_dataset(*arguments, **more):
        asked.append((*arguments, more))
        return [ROWS[name]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    fetched = load_bench(name)
    hub = BENCHES[name].hub
    assert hub is not None
    assert asked == [(hub.path, hub.name, {"split": hub.split})]
    local = load_bench(name, write(tmp_path / "rows.jsonl", ROWS[name]))
    assert fetched == local
    assert len(fetched.questions[0].turns) == (2 if name == "mt-bench" else 1)


def test_a_limit_is_spread_over_the_tasks_and_a_higher_one_keeps_the_lower(questions):
    all_of_them = load_bench("spec-bench", questions).questions
    ids = {n: [question.id for question in spread(all_of_them, n)] for n in (3, 5, None)}
    assert ids[3] == [0, 100, 200]
    assert ids[5] == [0, 1, 100, 101, 200]
    assert len(ids[None]) == 36
    third = select(all_of_them, Slice(every=5, offset=1, task="qa"))
    assert [question.id for question in third] == [101, 106, 111]


SOURCE = '''\
class Queue:
    def put(self, item, timeout=None):
        """Put it in.

        Waits where it is full.
        """
        if timeout is not None:
            end = now() + timeout
        while self.full:
            wait(end - now())
        log(item, timeout)
        self.items.append(item)
'''


def test_tasks_are_cut_from_documented_functions(tmp_path):
    for number in range(6):
        (tmp_path / f"m{number}.py").write_text(SOURCE)
    found = stdlib_questions(tmp_path, per_task=2)
    assert [question.task for question in found] == [
        *["completion"] * 2,
        *["edit"] * 2,
        *["docstring"] * 2,
    ]
    assert len({question.id for question in found}) == 6
    completion, edit, docstring = found[0], found[2], found[4]
    assert completion.plain is not None
    assert completion.plain.startswith('def put(self, item, timeout=None):\n    """Put it in.')
    assert completion.plain.endswith("    if timeout is not None:\n")
    assert edit.turns[0].startswith("Rename the parameter timeout to new_timeout.")
    assert edit.plain is not None
    assert edit.plain.endswith("def put(self, item, new_timeout=None):\n")
    assert "Put it in" not in docstring.turns[0]
    assert docstring.plain is not None
    assert docstring.plain.endswith('def put(self, item, timeout=None):\n    """')
