"""The prompts that wait, and which of them may start now.

A scheduler knows lengths in tokens, and nothing of models.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice, takewhile
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
    """Prompts that wait, in the order in which they came."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._line: dict[int, Prompt] = {}  # By index.

    def __len__(self) -> int:
        return len(self._line)

    def add(self, prompt: Prompt) -> None:
        self._line[prompt.index] = prompt

    def start_next(self, running: Sequence[int], limits: Limits) -> Prompt | None:
        """Starts the first prompt that the scheduler chooses and that fits beside the running ones.

        If none runs and it chooses none, the first prompt of all starts.
        """
        sharing = self._sharing()
        if not sharing:
            return None
        # Each row takes as much memory as the longest.
        taken = len(running) * max(running, default=0)
        num_free = sys.maxsize if limits.max_tokens is None else limits.max_tokens - taken
        lengths = [prompt.max_columns for prompt in sharing]
        chosen = self._scheduler.choose(lengths, running, num_free)
        for index in chosen if running or chosen else [0]:
            if limits.fits([*running, sharing[index].max_columns]):
                self.leave(sharing[index].index)
                return sharing[index]
        return None

    def leave(self, index: int) -> None:
        self._line.pop(index, None)

    @property
    def first(self) -> Prompt | None:
        return next(iter(self._line.values()), None)

    def _sharing(self) -> list[Prompt]:
        """The first prompts that may share forwards, up to the first that has to be alone."""
        shown = islice(self._line.values(), _MOST_SHOWN)
        return list(takewhile(lambda prompt: prompt.route.alone_reason is None, shown))
