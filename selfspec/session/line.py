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

    def turn(self, num_tokens: int) -> float:
        """The prompt with the least turn starts next; of equal ones, the one that came first.

        `num_tokens` are those of the prompt, of its longest answer and of the widest draft.
        """
        ...


class ArrivalOrder:
    """The prompt that came first: none overtakes another."""

    def turn(self, num_tokens: int) -> float:
        return 0


class ShortestFirst:
    """The shortest prompt, so that rows of similar lengths run together.

    So more of them fit than in order of arrival. While shorter prompts arrive, a long one waits.
    """

    def turn(self, num_tokens: int) -> float:
        return num_tokens


class Waiting:
    """Prompts that wait, in the order of their turns."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._line: list[tuple[float, Prompt]] = []  # Sorted by turn.

    def __len__(self) -> int:
        return len(self._line)

    @property
    def first(self) -> Prompt | None:
        return self._line[0][1] if self._line else None

    def add(self, prompt: Prompt) -> None:
        turn = self._scheduler.turn(prompt.max_columns)
        insort(self._line, (turn, prompt), key=itemgetter(0))  # After those of the same turn.

    def start_next(self, running: Sequence[int], limits: Limits) -> Prompt | None:
        """Starts the first prompt, if it fits beside rows that may come to need these columns.

        One that can't share forwards does not.
        """
        prompt = self.first
        if prompt is None or prompt.route.alone_reason is not None:
            return None
        if not limits.fits([*running, prompt.max_columns]):
            return None
        self.leave(prompt.index)
        return prompt

    def leave(self, index: int) -> None:
        self._line = [(turn, prompt) for turn, prompt in self._line if prompt.index != index]
