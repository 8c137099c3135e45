"""The prompts that wait, and which of them starts next.

A scheduler knows lengths in tokens, and nothing of models.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from selfspec.forward.sizes import Limits
    from selfspec.prompt import Prompt


class Scheduler(Protocol):
    """Says in which order prompts start."""

    def turn(self, num_tokens: int, num_started: int, *, is_alone: bool) -> float:
        """The prompt with the least turn starts next; of equal ones, the one that came first.

        `num_tokens` are those of the prompt, of its longest answer and of the widest draft. All
        prompts that had started when it came had `num_started` of them. One that `is_alone` can't
        share forwards, so that it starts once no other text is written.
        """
        ...


class ArrivalOrder:
    """The prompt that came first; at the end, those that are written alone."""

    def turn(self, num_tokens: int, num_started: int, *, is_alone: bool) -> float:
        return float(is_alone)


class ShortestFirst:
    """The shortest prompt, so that rows of similar lengths run together; those alone at the end.

    So more of them fit than in order of arrival. While shorter prompts arrive, a long one waits.
    """

    def turn(self, num_tokens: int, num_started: int, *, is_alone: bool) -> float:
        return float("inf") if is_alone else num_tokens


class FairOrder:
    """A short prompt may overtake a long one, but no prompt waits for ever.

    It is overtaken by no more than its own length of work that starts after it came.
    """

    def turn(self, num_tokens: int, num_started: int, *, is_alone: bool) -> float:
        """
        >>> FairOrder().turn(100, 0, is_alone=False) < FairOrder().turn(10, 95, is_alone=False)
        True
        """
        return num_started + num_tokens


class Waiting:
    """Prompts that wait, in the order of their turns."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._line: list[tuple[float, Prompt]] = []  # By turns.
        self._num_started = 0  # In tokens.

    def __len__(self) -> int:
        return len(self._line)

    @property
    def first(self) -> Prompt | None:
        return self._line[0][1] if self._line else None

    def add(self, prompt: Prompt) -> None:
        is_alone = prompt.route.alone_reason is not None
        turn = self._scheduler.turn(prompt.max_columns, self._num_started, is_alone=is_alone)
        insort(self._line, (turn, prompt), key=itemgetter(0))  # After those of the same turn.

    def start_next(self, running: Sequence[int], limits: Limits) -> Prompt | None:
        """Starts the first prompt, if it fits beside rows that may come to need these columns."""
        prompt = self.first
        if prompt is None or prompt.route.alone_reason is not None:
            return None
        if not limits.fits([*running, prompt.max_columns]):
            return None
        self.start(prompt)
        return prompt

    def start(self, prompt: Prompt) -> None:
        self._num_started += prompt.max_columns
        self.leave(prompt.index)

    def leave(self, index: int) -> None:
        self._line = [(turn, prompt) for turn, prompt in self._line if prompt.index != index]
