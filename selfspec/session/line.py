"""The prompts that wait, and which of them may start now.

A scheduler knows lengths in tokens, and nothing of models.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Sequence
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from selfspec.forward.sizes import Limits
    from selfspec.prompt import Prompt

_MOST_SHOWN = 256  # The most prompts that a scheduler chooses among.


class Scheduler(Protocol):
    """Chooses among waiting prompts whenever there is a place, until none starts any more."""

    def choose(self, waiting: Sequence[int], running: Sequence[int], num_free: int) -> list[int]:
        """The indices of the waiting prompts to start now, in this order.

        `waiting` and `running` have a number for each prompt: its tokens, those of its longest
        answer, and the nodes of the widest draft. Rows that run together all take as much memory as
        the longest. `num_free` is how many tokens are free now. A chosen prompt that does not fit
        goes on waiting.
        """
        ...


class ArrivalOrder:
    """The prompt that came first: none overtakes another."""

    def choose(self, waiting: Sequence[int], running: Sequence[int], num_free: int) -> list[int]:
        return [0]


class ShortestFirst:
    """The shortest prompt, so that rows of similar lengths run together.

    So more of them fit than in order of arrival. While shorter prompts arrive, a long one waits.
    """

    def choose(self, waiting: Sequence[int], running: Sequence[int], num_free: int) -> list[int]:
        """
        >>> ShortestFirst().choose([10, 20, 5], running=[20], num_free=20)
        [2]
        """
        return [min(range(len(waiting)), key=waiting.__getitem__)]


class Waiting:
    """Prompts that wait, in the order of their turns. Prompts that are decoded alone come last.

    With `short_first` a short prompt may overtake a long one, but every prompt gets its turn: its
    length plus the length of all prompts that had started when it came.
    """

    def __init__(self, scheduler: Scheduler | None = None, *, short_first: bool = False) -> None:
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._short_first = short_first
        self._line: list[tuple[tuple[bool, int], Prompt]] = []  # By turns.
        self._work_started = 0  # In tokens.

    def __len__(self) -> int:
        return len(self._line)

    def add(self, prompt: Prompt) -> None:
        turn = (prompt.route.alone_reason is not None, 0)
        if self._short_first:
            turn = (False, self._work_started + prompt.max_columns)
        insort(self._line, (turn, prompt), key=itemgetter(0))  # After those of the same turn.

    def start_next(self, running: Sequence[int], limits: Limits) -> Prompt | None:
        """Starts the first prompt that the scheduler chooses and that fits beside the running ones.

        If none runs and it chooses none, the first prompt of all starts.
        """
        sharing = self.sharing()
        if not sharing:
            return None
        # Each row takes as much memory as the longest.
        taken = len(running) * max(running, default=0)
        num_free = sys.maxsize if limits.max_tokens is None else limits.max_tokens - taken
        lengths = [prompt.max_columns for prompt in sharing]
        chosen = self._scheduler.choose(lengths, running, num_free)
        for index in chosen if running or chosen else [0]:
            if limits.fits([*running, sharing[index].max_columns]):
                self.start(sharing[index])
                return sharing[index]
        return None

    def start(self, prompt: Prompt) -> None:
        self._work_started += prompt.max_columns
        self.leave(prompt.index)

    def leave(self, index: int) -> None:
        self._line = [(turn, prompt) for turn, prompt in self._line if prompt.index != index]

    @property
    def first(self) -> Prompt | None:
        return self._line[0][1] if self._line else None

    def sharing(self) -> list[Prompt]:
        """The first prompts that may share forwards, up to the first that has to be alone."""
        shown = (prompt for _, prompt in self._line[:_MOST_SHOWN])
        return list(takewhile(lambda prompt: prompt.route.alone_reason is None, shown))
