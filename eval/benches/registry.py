"""Where questions come from: benches by name, or a file of one's own.

    spec-bench    six tasks of 80, some of two turns; needs its question.jsonl
    mt-bench      eight categories of 10, two turns each
    humaneval     164 Python functions to complete
    gsm8k         1,319 school problems
    mbpp          500 small Python programs
    code-stdlib   completion, edit and docstring tasks cut from the standard library, offline
    random        200 texts of 200 random tokens, which no draft can guess
    FILE.jsonl    {"turns": ["…", "…"]} or {"prompt": "…"} a line; question_id and category optional

Knows no tokenizer: a question is text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import AliasChoices, BaseModel, Field, model_validator

from eval.benches.entries import Entry, Id, Text, Texts, entry, read_entries
from eval.benches.questions import (
    Question,
    SpecBenchRow,
    every_nth,
    of_task,
    questions_of,
    ranks,
)
from eval.benches.random_text import random_questions
from eval.benches.stdlib import stdlib_questions
from eval.errors import EvalError
from selfspec.errors import unknown_name


class Hub(NamedTuple):
    """What `datasets` calls a bench."""

    path: str
    name: str | None
    split: str


class Bench(NamedTuple):
    """What its rows are, each with a `question`, and where they are when no file is given."""

    row: type[BaseModel]
    hub: Hub | None = None


class Loaded(NamedTuple):
    """A bench's questions, and the hash that says whether two runs had the same ones."""

    name: str
    questions: list[Question]
    sha256: str


class Slice(NamedTuple):
    """Which questions of a bench are asked."""

    task: str | None = None
    every: int = 1
    offset: int = 0
    limit: int | None = None
    in_order: bool = False  # the limit takes the first ones, and does not spread over the tasks


def load_bench(name: str, path: Path | None = None) -> Loaded:
    """All questions of a bench; `path` is a local file of it in its own format."""
    if name in _MADE_HERE:
        _refuse_file(name, path)
        return _loaded(name, _MADE_HERE[name]())
    if name in BENCHES:
        return _loaded(name, _questions(name, BENCHES[name], path))
    if not name.endswith((".json", ".jsonl")):
        message = unknown_name("bench", name, [*BENCHES, *_MADE_HERE])
        raise EvalError(f"{message}; or name a FILE.jsonl of your own")
    _refuse_file(name, path)
    own = Path(name).expanduser()
    return _loaded(own.name, _questions(own.name, Bench(_own_row(own.stem)), own))


def select(questions: Sequence[Question], asked: Slice) -> list[Question]:
    """The questions of the slice but for its limit, in the bench's order."""
    return every_nth(of_task(questions, asked.task), offset=asked.offset, every=asked.every)


def limited(questions: Sequence[Question], asked: Slice) -> list[Question]:
    """As many as the slice allows. A higher limit keeps what a lower one takes."""
    return list(questions[: asked.limit]) if asked.in_order else spread(questions, asked.limit)


def spread(questions: Sequence[Question], number: int | None) -> list[Question]:
    """So many of them, spread over the tasks: the first of each, then the second, in their order.

    A higher number keeps what a lower one takes, so that a run can be made longer.
    """
    order = sorted(range(len(questions)), key=ranks(questions).__getitem__)
    return [questions[index] for index in sorted(order[:number])]


def _questions(name: str, bench: Bench, path: Path | None) -> list[Question]:
    if path is not None:
        entries: Iterable[Entry] = read_entries(path, bench.row)
    elif bench.hub is not None:
        entries = _hub_entries(name, bench.hub, bench.row)
    else:
        raise EvalError(
            f"bench {name!r} must have its file, which its repository keeps as "
            "data/spec_bench/question.jsonl (got --questions nothing); pass --questions PATH"
        )
    questions = questions_of(entries)
    if not questions:
        raise EvalError(f"{path or name} must hold a question at least (got none)")
    return questions


def _hub_entries(name: str, hub: Hub, kind: type[BaseModel]) -> Iterator[Entry]:
    try:
        import datasets
    except ImportError as error:
        raise EvalError(
            f"bench {name!r} needs the datasets package: pip install datasets; or pass "
            "--questions with a local file of it"
        ) from error
    try:
        rows = datasets.load_dataset(hub.path, hub.name, split=hub.split)
    except (OSError, RuntimeError, ValueError) as error:
        raise EvalError(
            f"bench {name!r} can't be loaded as {hub.path!r}: {str(error).splitlines()[0]}; "
            "pass --questions with a local file of it"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield entry(f"{hub.path} row", number, partial(kind.model_validate, row))


def _refuse_file(name: str, path: Path | None) -> None:
    if path is not None:
        raise EvalError(f"bench {name!r} takes no --questions (got {str(path)!r}); leave it out")


def _loaded(name: str, questions: list[Question]) -> Loaded:
    text = json.dumps([astuple(question) for question in questions])
    return Loaded(name, questions, hashlib.sha256(text.encode()).hexdigest())


class _MtBenchRow(BaseModel):
    """A line of FastChat's question.jsonl, or a row of the data set, which has other names."""

    question_id: Id = Field(validation_alias=AliasChoices("question_id", "prompt_id"))
    category: Text
    turns: Texts = Field(validation_alias=AliasChoices("turns", "prompt"))

    def question(self, number: int) -> Question:
        return Question(self.question_id, self.category, tuple(self.turns))


class _HumanEvalRow(BaseModel):
    task_id: Id
    prompt: Text

    def question(self, number: int) -> Question:
        turn = f"Complete this Python function. Answer with the code alone.\n\n{self.prompt}"
        return Question(self.task_id, "humaneval", (turn,), self.prompt)


class _Gsm8kRow(BaseModel):
    """Has no id of its own."""

    text: Text = Field(validation_alias="question")

    def question(self, number: int) -> Question:
        return Question(number, "gsm8k", (self.text,), f"Question: {self.text}\nAnswer:")


class _MbppRow(BaseModel):
    task_id: Id
    text: Text
    test_list: Texts

    def question(self, number: int) -> Question:
        tests = "\n".join(self.test_list)
        turn = f"{self.text} Your code should pass these tests:\n\n{tests}"
        return Question(self.task_id, "mbpp", (turn,), f'"""\n{turn}\n"""\n')


def _own_row(stem: str) -> type[BaseModel]:
    """Spec-Bench's schema with what can be left out left out."""

    class OwnRow(BaseModel):
        question_id: Id | None = None
        category: Text = stem
        turns: Texts | None = None
        prompt: Text | None = None

        @model_validator(mode="after")
        def _has_text(self) -> Any:
            if self.turns is None and self.prompt is None:
                raise ValueError("there must be 'turns' or a 'prompt'")
            return self

        def question(self, number: int) -> Question:
            turns = self.turns or [str(self.prompt)]
            name = number if self.question_id is None else self.question_id
            return Question(name, self.category, tuple(turns))

    return OwnRow


BENCHES: dict[str, Bench] = {
    "spec-bench": Bench(SpecBenchRow),
    "mt-bench": Bench(_MtBenchRow, Hub("HuggingFaceH4/mt_bench_prompts", None, "train")),
    "humaneval": Bench(_HumanEvalRow, Hub("openai/openai_humaneval", None, "test")),
    "gsm8k": Bench(_Gsm8kRow, Hub("openai/gsm8k", "main", "test")),
    "mbpp": Bench(_MbppRow, Hub("google-research-datasets/mbpp", "full", "test")),
}
_MADE_HERE: dict[str, Callable[[], list[Question]]] = {
    "code-stdlib": stdlib_questions,
    "random": random_questions,
}
