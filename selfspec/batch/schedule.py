"""Which of the waiting prompts may start now: the contract, and two orders.

Knows lengths in tokens; nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


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
        return _that_fit(range(len(waiting)), waiting, running, room)


class ShortestFirst:
    """The shortest prompts, as many as fit, so that rows of similar lengths run together.

    Rows that run together all take as much memory as the longest. So more of them fit than in order
    of arrival, and answers are there earlier on average. As long as shorter prompts arrive, a long
    one waits.
    """

    def choose(self, waiting: Sequence[int], running: Sequence[int], room: int) -> list[int]:
        """The shortest ones, up to the first that does not fit.

        >>> ShortestFirst().choose([10, 20, 5], running=[20], room=20)
        [2]
        """
        order = sorted(range(len(waiting)), key=waiting.__getitem__)
        return _that_fit(order, waiting, running, room)


def _that_fit(
    order: Sequence[int], waiting: Sequence[int], running: Sequence[int], room: int
) -> list[int]:
    """The prompts of an order, up to the first that does not fit."""
    longest = max(running, default=0)
    total = room + len(running) * longest
    for number, index in enumerate(order):
        longest = max(longest, waiting[index])
        if (len(running) + number + 1) * longest > total:
            return list(order[:number])
    return list(order)
