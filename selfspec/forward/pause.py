"""When to try again what failed for want of memory, which may be free by now."""

from __future__ import annotations


class Pause:
    """A number of steps in which something is not tried, twice as many after each failure.

    >>> pause = Pause(first=2, longest=4)
    >>> for _ in range(3):
    ...     pause.begin()
    ...     print([pause.step() for _ in range(5)])
    [False, False, True, True, True]
    [False, False, False, False, True]
    [False, False, False, False, True]
    """

    def __init__(self, first: int, longest: int) -> None:
        self._next, self._longest = first, longest
        self._left = 0

    def begin(self) -> None:
        """Starts to count after a failure."""
        self._left = self._next
        self._next = min(2 * self._next, self._longest)

    def step(self) -> bool:
        """Counts a step; is the pause over by then?"""
        if self._left:
            self._left -= 1
            return False
        return True
