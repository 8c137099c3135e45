"""Questions in Spec-Bench's own schema, and parts of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benches.entries import Entry, read_entries
from eval.errors import EvalError
from selfspec.errors import unknown_name

FIELDS = ("question_id", "category", "turns")
# Spec-Bench files MT-Bench's eight categories under one task
MT_CATEGORIES = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)


@dataclass(frozen=True)
class Question:
    """One question: its task and the user's turns.

    `plain` is what a model with no chat template continues in place of the first turn; None:
    the turn as it is.
    """

    id: int | str
    task: str
    turns: tuple[str, ...]
    plain: str | None = None


def read_questions(path: Path) -> list[Question]:
    """Reads a `question.jsonl`; a malformed line is named by its number."""
    entries = list(read_entries(path, FIELDS))
    questions = [question_of(entry) for entry in entries]
    check_ids(questions, [entry.where for entry in entries])
    return questions


def question_of(entry: Entry) -> Question:
    """A question from an object in Spec-Bench's schema."""
    task = entry.text("category")
    task = "multi-turn" if task in MT_CATEGORIES else task
    return Question(entry.name("question_id"), task, entry.texts("turns"))


def check_ids(questions: Sequence[Question], lines: Sequence[str]) -> None:
    """Refuses an id that comes twice: results are filed by it."""
    seen: dict[int | str, str] = {}
    for question, line in zip(questions, lines, strict=True):
        if question.id in seen:
            raise EvalError(
                f"{line}: 'question_id' must not come twice (got {question.id!r}, as in "
                f"{seen[question.id]}); give each question its own"
            )
        seen[question.id] = line


def every_nth(questions: Iterable[Question], *, offset: int, every: int) -> list[Question]:
    """Of each task, in order, the questions number `offset`, `offset + every`, … from 0."""
    questions = list(questions)
    pairs = zip(questions, ranks(questions), strict=True)
    return [question for question, rank in pairs if rank % every == offset]


def ranks(questions: Iterable[Any]) -> list[int]:
    """Of each, how many of its task stand before it."""
    seen: Counter[str] = Counter()
    found = []
    for question in questions:
        found.append(seen[question.task])
        seen[question.task] += 1
    return found


def of_task(questions: Sequence[Question], task: str | None) -> list[Question]:
    """Those of one task; None: all. An unknown one is answered with the nearest."""
    tasks = {question.task for question in questions}
    if task is not None and task not in tasks:
        raise EvalError(unknown_name("task", task, tasks))
    return [question for question in questions if task in (None, question.task)]
