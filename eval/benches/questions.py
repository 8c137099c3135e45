"""Questions in Spec-Bench's own schema, and parts of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from eval.benches.entries import Entry, Id, Text, Texts, read_entries
from eval.errors import EvalError
from selfspec.errors import unknown_name

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


class SpecBenchRow(BaseModel):
    """Spec-Bench's own schema."""

    question_id: Id
    category: Text
    turns: Texts

    def question(self, number: int) -> Question:
        task = "multi-turn" if self.category in MT_CATEGORIES else self.category
        return Question(self.question_id, task, tuple(self.turns))


def read_questions(path: Path) -> list[Question]:
    """Reads a `question.jsonl`; a malformed line is named by its number."""
    return questions_of(read_entries(path, SpecBenchRow))


def questions_of(entries: Iterable[Entry]) -> list[Question]:
    """Refuses an id that comes twice: results are filed by it."""
    found: dict[int | str, Question] = {}
    for entry in entries:
        question = entry.row.question(entry.number)
        if question.id in found:
            raise EvalError(
                f"{entry.where}: an id must not come twice (got {question.id!r}); give each "
                "question its own"
            )
        found[question.id] = question
    return list(found.values())


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
