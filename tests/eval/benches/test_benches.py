"""Benches: where questions come from, which of them are asked, and what is said of a bad row."""

from __future__ import annotations

import ast
import json
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from eval.benches.dialogue import Prompter
from eval.benches.prompts import load_questions
from eval.benches.questions import Question, spread
from eval.benches.registry import BENCHES, load_bench
from eval.benches.stdlib import stdlib_edits, stdlib_questions
from eval.errors import EvalError
from tests.cli.conftest import write_lines as write
from tests.conftest import TEMPLATE
from tests.tiny import make_tokenizer

GOOD = {"question_id": 1, "category": "qa", "turns": ["what?"]}


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "the row"),
        ({**GOOD, "turns": ["a", " "]}, r"turns\.1"),
        ({**GOOD, "question_id": True}, "question_id"),
        (GOOD, "an id must not come twice"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path, line, field):
    path = write(tmp_path / "question.jsonl", GOOD, line)
    with pytest.raises(EvalError, match=f"line 2: {field}"):
        load_bench("spec-bench", path)


def test_a_file_of_ones_own_may_leave_out_what_is_not_needed(tmp_path):
    path = write(tmp_path / "mine.jsonl", {"prompt": "one"}, {"turns": ["a", "b"], "category": "x"})
    found = [(q.id, q.task, q.turns) for q in load_bench(str(path)).questions]
    assert found == [(1, "mine", ("one",)), (2, "x", ("a", "b"))]


SPEED = {"question_id": "a1", "sub_category": "", "source": "x", "multiturn": True}
ROWS = {
    "speed-bench": {**SPEED, "category": "rag", "turns": ["Read this.", "And now?"]},
    "speed-bench-32k": {**SPEED, "category": "low_entropy", "turns": ["Sort these lines."]},
    "mt-bench": {"prompt_id": 7, "category": "math", "prompt": ["1 + 1?", "and 2 + 2?"]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n"},
    "gsm8k": {"question": "How many?", "answer": "3"},
    "mbpp": {"task_id": 11, "text": "Write f.", "test_list": ["assert f(1) == 2"], "code": ""},
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_benches_of_the_hub_come_through_datasets_or_a_local_file(tmp_path, monkeypatch, name):
    def load_dataset(*arguments, split):
        assert (*arguments, split) == BENCHES[name].hub
        return [ROWS[name]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    fetched = load_bench(name)
    assert fetched == load_bench(name, write(tmp_path / "rows.jsonl", ROWS[name]))
    assert len(fetched.questions[0].turns) == (2 if name in ("mt-bench", "speed-bench") else 1)


def test_which_questions_are_asked(questions):
    """A limit is spread over the tasks. Questions that are too long are left out."""
    all_of_them = load_bench("spec-bench", questions).questions
    ids = {n: [question.id for question in spread(all_of_them, n)] for n in (5, None)}
    assert (ids[5], len(ids[None])) == ([0, 1, 100, 101, 200], 36)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with questions.open("a") as file:
        file.write(json.dumps({**GOOD, "question_id": 999, "turns": ["word " * 2000]}) + "\n")
    for task, offset, expected in ((None, 0, [0, 10, 100, 110, 200, 210]), ("qa", 1, [101, 111])):
        options = Namespace(questions=questions, task=task, every=10, offset=offset, limit=None)
        found = [question.id for question, _ in load_questions(options, tokenizer)]
        assert found == expected


def test_a_chat_template_is_used_where_there_is_one():
    question, tokenizer = Question(1, "qa", ("first", "second"), "go on:"), make_tokenizer()
    plain = Prompter(tokenizer).prompt_ids(question, ["yes"])
    assert tokenizer.decode(plain) == "go on:yes\n\nsecond\n"
    tokenizer.chat_template = TEMPLATE
    text = tokenizer.decode(Prompter(tokenizer).prompt_ids(question, ["yes"]))
    assert text == "<|user|>first<|assistant|>yes<|eos|><|user|>second<|assistant|>"


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


def test_tasks_and_edits_are_cut_from_documented_functions(tmp_path):
    for number in range(6):
        (tmp_path / f"m{number}.py").write_text(SOURCE)
    completion, edit, docstring = found = stdlib_questions(tmp_path, per_task=1)
    assert [question.task for question in found] == ["completion", "edit", "docstring"]
    assert completion.plain.startswith('def put(self, item, timeout=None):\n    """Put it in.')
    assert completion.plain.endswith("    if timeout is not None:\n")
    assert edit.turns[0].startswith("Rename the parameter timeout to new_timeout.")
    assert edit.plain.endswith("def put(self, item, new_timeout=None):\n")
    assert docstring.plain.endswith('def put(self, item, timeout=None):\n    """')
    rename, insert, delete = stdlib_edits(1, tmp_path)
    assert rename.after == rename.before.replace("timeout", "new_timeout")
    assert (insert.before, insert.after) == (delete.after, delete.before)
    assert ast.get_docstring(ast.parse(insert.after).body[0]).startswith("Put it in.")
    assert ast.get_docstring(ast.parse(insert.before).body[0]) is None
