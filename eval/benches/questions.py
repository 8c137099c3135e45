"""Questions as text, and which of them are asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eval.errors import EvalError
from selfspec.errors import unknown_name


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


class Slice(NamedTuple):
    """Which questions of a bench are asked."""

    task: str | None = None
    every: int = 1
    offset: int = 0
    limit: int | None = None
    in_order: bool = False  # The limit takes the first ones, and does not spread over the tasks.


def select(questions: Sequence[Question], asked: Slice) -> list[Question]:
    """Of each task, the questions number `offset`, `offset + every`, … from 0, in their order.

    The limit is not applied yet: questions that are too long have to be taken out first.
    """
    tasks = {question.task for question in questions}
    if asked.task is not None and asked.task not in tasks:
        raise EvalError(unknown_name("task", asked.task, tasks))
    return [
        question
        for question, rank in zip(questions, ranks(questions), strict=True)
        if asked.task in (None, question.task) and rank % asked.every == asked.offset
    ]


def limited(questions: Sequence[Question], asked: Slice) -> list[Question]:
    """As many as the slice allows. A higher limit keeps what a lower one takes."""
    return list(questions[: asked.limit]) if asked.in_order else spread(questions, asked.limit)


def spread(questions: Sequence[Question], number: int | None) -> list[Question]:
    """So many of them, spread over the tasks: the first of each, then the second, in their order.

    A higher number keeps what a lower one takes, so that a run can be made longer.
    """
    order = sorted(range(len(questions)), key=ranks(questions).__getitem__)
    return [questions[index] for index in sorted(order[:number])]


def ranks(questions: Iterable[Any]) -> list[int]:
    """Of each, how many of its task stand before it."""
    seen: Counter[str] = Counter()
    found = []
    for question in questions:
        found.append(seen[question.task])
        seen[question.task] += 1
    return found
