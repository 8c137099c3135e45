"""A clock beside something that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Watch"]


class Watch(NamedTuple):
    """Runs something of a given width by a clock, up to an end."""

    run: Callable[[int], object]
    clock: Callable[[], float]
    end: float

    def seconds_of(self, width: int) -> float:
        """The seconds of one run of a width, which are never 0."""
        start = self.clock()
        self.run(width)
        # A clock may be too coarse to see it.
        return max(self.clock() - start, 1e-9)

    def has_time_for(self, seconds: float) -> bool:
        """Is the end still so many seconds away?"""
        return self.clock() + seconds <= self.end
