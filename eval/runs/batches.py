"""Questions that are answered together: one, or a batch of the same task and number of turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eval.benches.questions import Question
from eval.report.rows import Key

Id = int | str


class Batch(NamedTuple):
    """Questions of one task and of as many turns.

    `number` is the first one's in the bench and goes into the seed, so that a longer run draws
    the same; `order` is its own among those that are asked, and decides who answers first.
    """

    number: int
    order: int
    questions: tuple[Question, ...]
    num_turns: int

    @property
    def ids(self) -> tuple[Id, ...]:
        return tuple(question.id for question in self.questions)

    def keys(self, methods: Sequence[str], number: int = 0) -> list[Key]:
        """Of all answers that there will be in the round of that number."""
        turns = range(self.num_turns)
        return [Key(self.ids, turn, name, number) for turn in turns for name in methods]


def batches(
    questions: Sequence[Question], numbers: Mapping[Id, int], size: int, max_turns: int | None
) -> list[Batch]:
    """Questions in order; a batch ends where the task or the number of turns changes."""
    groups: list[list[Question]] = []
    for question in questions:
        last = groups[-1] if groups else []
        if last and len(last) < size and _kind(last[0]) == _kind(question):
            last.append(question)
        else:
            groups.append([question])
    return [
        Batch(
            numbers[group[0].id],
            order,
            tuple(group),
            min(len(group[0].turns), max_turns or len(group[0].turns)),
        )
        for order, group in enumerate(groups)
    ]


def _kind(question: Question) -> tuple[str, int]:
    return question.task, len(question.turns)
