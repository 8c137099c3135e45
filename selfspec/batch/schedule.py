"""Which of the waiting prompts may start now: the contract, and order of arrival.

Knows lengths in tokens; nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["ArrivalOrder", "Scheduler"]


class Scheduler(Protocol):
    """Chooses among waiting prompts whenever a row ends."""

    def choose(self, waiting: Sequence[int], running: Sequence[int], room: int) -> list[int]:
        """The indices of the waiting prompts to start now, in this order.

        `waiting` and `running` are how many tokens each prompt may take with its answer and the
        widest draft. Rows that run together all take as much memory as the longest. `room` is how
        many tokens are free beside those that run. What does not fit is left waiting, whatever is
        said here.
        """
        ...


class ArrivalOrder:
    """The prompts that came first, as many as fit; none overtakes another."""

    def choose(self, waiting: Sequence[int], running: Sequence[int], room: int) -> list[int]:
        """The first ones, up to the first that does not fit.

        >>> ArrivalOrder().choose([10, 20, 5], running=[20], room=40)
        [0, 1]
        """
        longest = max(running, default=0)
        total = room + len(running) * longest
        for index, length in enumerate(waiting):
            longest = max(longest, length)
            if (len(running) + index + 1) * longest > total:
                return list(range(index))
        return list(range(len(waiting)))
