"""Calls that wait for a row, in the order in which their turn comes."""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from selfspec.plugin.call import Call

_MOST_SHOWN = 256  # The most prompts that a scheduler chooses among.

_Turn = tuple[bool, int, int]


class Waiting:
    """Calls by turn. Adding one, and removing one from anywhere, costs O(log n).

    In order of arrival, those that are decoded alone come after all others.

    With `short_first` a short prompt may overtake a long one, but none waits for ever: the turn of
    a call is its length plus the length of all calls that had started when it came. So one of
    1,000 tokens is overtaken by others that come while less than 1,000 tokens of work are started,
    and by none that comes later.
    """

    def __init__(self, *, short_first: bool = False) -> None:
        self._short_first = short_first
        self._turns: dict[int, _Turn] = {}  # By the call's index.
        self._calls: Any = SortedDict()  # By turn.
        self._num_arrived = 0
        self._work_started = 0  # In tokens.

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, call: Call) -> None:
        """Lets one more call wait."""
        self._num_arrived += 1
        if self._short_first:
            turn = (False, self._work_started + call.need, self._num_arrived)
        else:
            turn = (call.alone_reason is not None, 0, self._num_arrived)
        self._turns[call.index] = turn
        self._calls[turn] = call

    def start(self, call: Call) -> None:
        """Takes out a call whose prompt is read now."""
        self._work_started += call.need
        self.leave(call.index)

    def leave(self, index: int) -> bool:
        """Takes out a call that nobody wants any more; False if it does not wait."""
        turn = self._turns.pop(index, None)
        if turn is not None:
            del self._calls[turn]
        return turn is not None

    @property
    def next_alone(self) -> Call | None:
        """The first call, if it has to be decoded alone."""
        first: Call | None = next(iter(self._calls.values()), None)
        return first if first is not None and first.alone_reason is not None else None

    def sharing(self) -> list[Call]:
        """The first calls that may share forwards, up to the first that has to be alone."""
        shown = islice(self._calls.values(), _MOST_SHOWN)
        return list(takewhile(lambda call: call.alone_reason is None, shown))
