"""Where questions come from: benches by name, or a file of one's own.

`python -m eval run --help` lists them. Knows no tokenizer: a question is text. An error names the
line and the field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AliasChoices,
    BaseModel,
    Field,
    StrictInt,
    StrictStr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from eval.benches.questions import Question
from eval.benches.random_text import random_questions
from eval.benches.stdlib import stdlib_questions
from eval.errors import EvalError
from selfspec.errors import unknown_name

Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]
Texts = Annotated[list[Text], Field(min_length=1)]
Id = StrictInt | StrictStr
# Spec-Bench files MT-Bench's eight categories under one task.
MT_CATEGORIES = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)

_SPEED = "nvidia/SPEED-Bench"


class Bench(NamedTuple):
    """What its rows are, and what `datasets` calls it: path, name and split."""

    row: type[BaseModel]
    hub: tuple[str, str | None, str] | None = None


class Loaded(NamedTuple):
    """A bench's questions, and the hash that says whether two runs had the same ones."""

    name: str
    questions: list[Question]
    sha256: str


def load_bench(name: str, path: Path | None = None) -> Loaded:
    """All questions of a bench; `path` is a local file of it in its own format."""
    if name in BENCHES:
        return _loaded(name, _questions(name, BENCHES[name], path))
    if name not in MADE_HERE and not name.endswith((".json", ".jsonl")):
        message = unknown_name("bench", name, [*BENCHES, *MADE_HERE])
        raise EvalError(f"{message}; or name a FILE.jsonl of your own")
    if path is not None:
        raise EvalError(f"bench {name!r} takes no --questions (got {str(path)!r}); leave it out")
    if name in MADE_HERE:
        return _loaded(name, MADE_HERE[name]())
    own = Path(name).expanduser()
    questions = _questions(own.name, Bench(_OwnRow), own)
    return _loaded(
        own.name, [replace(question, task=question.task or own.stem) for question in questions]
    )


def _loaded(name: str, questions: list[Question]) -> Loaded:
    text = json.dumps([astuple(question) for question in questions])
    return Loaded(name, questions, hashlib.sha256(text.encode()).hexdigest())


def _questions(name: str, bench: Bench, path: Path | None) -> list[Question]:
    """Refuses an id that comes twice: results are filed by it."""
    if path is None and bench.hub is None:
        raise EvalError(
            f"bench {name!r} must have its file, which its repository keeps as "
            "data/spec_bench/question.jsonl (got --questions nothing); pass --questions PATH"
        )
    rows = _of_hub(name, bench) if path is None else _of_file(path, bench.row)
    found: dict[int | str, Question] = {}
    for where, number, read in rows:
        try:
            question = read().question(number)
        except ValidationError as error:
            raise EvalError(f"{where} {number}: {_problem(error)}; mend it") from error
        if question.id in found:
            raise EvalError(
                f"{where} {number}: an id must not come twice (got {question.id!r}); give each "
                "question its own"
            )
        found[question.id] = question
    if not found:
        raise EvalError(f"{path or name} must hold a question at least (got none)")
    return list(found.values())


_Rows = Iterator[tuple[str, int, Callable[[], Any]]]  # A source, a number, and what reads the row.


def _of_file(path: Path, kind: type[BaseModel]) -> _Rows:
    """The rows of a file, blank lines left out."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{path} must be a file of UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path} line", number, partial(kind.model_validate_json, line)


def _of_hub(name: str, bench: Bench) -> _Rows:
    assert bench.hub is not None
    path, part, split = bench.hub
    try:
        import datasets

        rows = datasets.load_dataset(path, part, split=split)
    except ImportError as error:
        raise EvalError(
            f"bench {name!r} needs the datasets package: pip install datasets; or pass "
            "--questions with a local file of it"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise EvalError(
            f"bench {name!r} can't be loaded as {path!r}: {str(error).splitlines()[0]}; "
            "pass --questions with a local file of it"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{path} row", number, partial(bench.row.model_validate, row)


def _problem(error: ValidationError) -> str:
    """The first thing that is wrong with a row, in a line."""
    problem = error.errors()[0]
    field = ".".join(map(str, problem["loc"])) or "the row"
    return f"{field}: {problem['msg']} (got {str(problem['input'])[:60]!r})"


class _SpecBenchRow(BaseModel):
    question_id: Id
    category: Text
    turns: Texts

    def question(self, number: int) -> Question:
        task = "multi-turn" if self.category in MT_CATEGORIES else self.category
        return Question(self.question_id, task, tuple(self.turns))


class _CategoryRow(BaseModel):
    """A row of MT-Bench or SPEED-Bench; MT-Bench's data set has other names than its file."""

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


class _OwnRow(BaseModel):
    """Spec-Bench's schema with what can be left out left out."""

    question_id: Id | None = None
    category: Text | None = None
    turns: Texts | None = None
    prompt: Text | None = None

    @model_validator(mode="after")
    def _has_text(self) -> Any:
        if self.turns is None and self.prompt is None:
            raise ValueError("there must be 'turns' or a 'prompt'")
        return self

    def question(self, number: int) -> Question:
        name = number if self.question_id is None else self.question_id
        return Question(name, self.category or "", tuple(self.turns or [str(self.prompt)]))


BENCHES: dict[str, Bench] = {
    "spec-bench": Bench(_SpecBenchRow),
    "speed-bench": Bench(_CategoryRow, (_SPEED, "qualitative", "test")),
    **{
        f"speed-bench-{size}": Bench(_CategoryRow, (_SPEED, f"throughput_{size}", "test"))
        for size in ("1k", "2k", "8k", "16k", "32k")
    },
    "mt-bench": Bench(_CategoryRow, ("HuggingFaceH4/mt_bench_prompts", None, "train")),
    "humaneval": Bench(_HumanEvalRow, ("openai/openai_humaneval", None, "test")),
    "gsm8k": Bench(_Gsm8kRow, ("openai/gsm8k", "main", "test")),
    "mbpp": Bench(_MbppRow, ("google-research-datasets/mbpp", "full", "test")),
}
MADE_HERE: dict[str, Callable[[], list[Question]]] = {
    "code-stdlib": stdlib_questions,
    "random": random_questions,
}
