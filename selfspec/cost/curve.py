"""What a step costs by its width: a time for a few widths, and a shape expected elsewhere.

Knows widths and times; not what runs, nor what is worth drafting.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from selfspec.cost.slowness import Slowness

# The widths that are timed. What lies between two of them costs as the wider one.
WIDTHS: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ALL = np.array([*WIDTHS, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096])
# The index of every width in `_ALL`.
_INDICES: list[int] = np.searchsorted(_ALL, np.arange(_ALL[-1] + 1)).tolist()
# A clock is wrong that says less or more seconds than these.
_SHORTEST, _LONGEST = 1e-9, 1e9
# A width's time is the geometric mean of its first 8 steps. Later steps count for 1/8.
_KNOWN = 8
# Once a width has 8 steps, a time that is off by more than 25 % counts as off by 25 %.
_FAR = math.log(1.25)
# What a width took beyond its expected time may have been bad luck, so this excess fades while
# steps are plain: after n steps of the width, half of it is left after 16 · width · n² plain steps.
_HALVING = 16
# An expectation has a query cost 0.7 plain steps at most. With more, none would be tried, and the
# steps that it was learned from may have met a busy machine.
_DEAREST = 0.7
# Added to what a query was expected to cost and to what it did, in plain steps: the ratio of two
# tiny costs says nothing.
_FLAT = 0.02
# No step is more than three of the widths above wider than the widest timed one, and the first one
# that is not plain no more than two.
_FARTHER, _FIRST = 3, 2


class CostCurve:
    """The seconds of a step by its width, never falling.

    Widths that were timed cost what was timed. Wider ones have the shape that was expected, steeper
    or flatter by as much as the timed ones turned out. What was expected is straight between the
    points that are given, and goes on at the slope of the whole; from one point alone every further
    query costs as much as the first: nothing is drafted where nothing is known. Safe to read and
    refine from several threads.

    >>> curve = CostCurve({1: 0.010, 2: 0.010, 8: 0.016, 16: 0.025})
    >>> [round(1000 * curve.seconds(width)) for width in (1, 4, 5, 6, 8, 12, 24)]
    [10, 12, 14, 14, 16, 20, 33]
    """

    def __init__(self, points: Mapping[int, float], *, is_timed: bool = True) -> None:
        """From the seconds at some widths, 1 among them.

        If they are not timed, only what they are relative to each other is expected, and the first
        plain steps say what one is in seconds.
        """
        widths, plain = sorted(points), points[1]
        relative = [seconds / plain for seconds in _rising([points[width] for width in widths])]
        slope = (relative[-1] - 1) / (widths[-1] - 1) if len(points) > 1 else 1.0
        wider = slope * np.maximum(_ALL - widths[-1], 0)
        # For each width: what was expected, in plain steps, and the seconds that were timed.
        self._expected = np.interp(_ALL, widths, relative) + wider
        self._timed: list[float] = (plain * self._expected).tolist()
        self._counts = [0] * len(_ALL)  # How many steps of the width were timed.
        for width in widths if is_timed else ():
            self._counts[_index(width)] = _KNOWN
        self.slowness = Slowness()
        self._lock = threading.Lock()
        self._seconds = self._fitted()

    @classmethod
    def unknown(cls, slope: float) -> CostCurve:
        """A curve that knows nothing yet but what every further query may cost, in plain steps."""
        return cls({1: 1.0, 2: 1.0 + slope}, is_timed=False)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that were timed, and 1."""
        return tuple(int(_ALL[index]) for index in self._timed_indices())

    @property
    def knows_plain(self) -> bool:
        """Were two plain steps timed? Before, no width can be weighed against them."""
        return self._counts[0] > 1

    def seconds(self, width: int) -> float:
        """The seconds of a step of `width` >= 1 queries; a look into a list."""
        return self._seconds[_index(width)]

    def table(self, widest: int) -> list[float]:
        """The seconds of every width up to `widest`, each at its own index; [0] is a filler."""
        seconds = self._seconds
        table = [seconds[index] for index in _INDICES[: widest + 1]]
        return table + seconds[-1:] * (widest + 1 - len(table))

    @staticmethod
    def ends(widest: int) -> list[int]:
        """Up to these widths the curve is level."""
        return [*_ALL[widest > _ALL].tolist(), widest]

    def relative(self, width: int) -> float:
        return self.seconds(width) / self.seconds(1)

    def widest_within(self, seconds: float, allowed: int) -> int:
        """The widest step up to `allowed` that should take no longer; 1 if none does.

        Not much wider than the widest one that was timed: nothing is found out by a leap.
        """
        widest = self._timed_indices()[-1]
        farthest = min(widest + (_FARTHER if widest else _FIRST), len(_ALL) - 1)
        widths = range(1, min(allowed, int(_ALL[farthest])) + 1)
        return max(bisect_right(widths, seconds, key=self.seconds), 1)

    def refine(self, width: int, seconds: float) -> None:
        """Takes in the seconds of a step of this width; costs some 20 µs.

        A change that lasts is followed within some 16 steps of its width. One odd step moves a
        known width by less than 3 %.
        """
        if not _SHORTEST <= seconds <= _LONGEST:
            return
        with self._lock:
            index = _index(width)
            # One by one its nodes would take this long; a step that took longer had bad luck.
            taken = min(seconds, width * self._timed[0]) if index else seconds
            before = self._seconds[index]
            moved = self._step_of(index, math.log(taken / before))
            self._timed[index] = before * math.exp(moved)
            if not index:
                self._forget_bad_luck()
            self._seconds = self._fitted()

    def of_other_length(self) -> CostCurve:
        """What to expect at another length of text: the same shape.

        The first plain step scales it. No width is expected to cost so much that it is never tried,
        since the machine may have been busy.
        """
        plain = self.seconds(1)
        points = {
            width: min(self.seconds(width), plain * (1 + _DEAREST * (width - 1)))
            for width in _ALL.tolist()
        }
        other = CostCurve(points, is_timed=False)
        other._counts[0] = 1  # The time of earlier plain steps counts as one step.
        return other

    def _timed_indices(self) -> list[int]:
        return [index for index, count in enumerate(self._counts) if count or not index]

    def _step_of(self, index: int, change: float) -> float:
        """How far a time moves for a time whose log is `change` away from it."""
        was_known = self._counts[index] == _KNOWN
        count = self._counts[index] = min(self._counts[index] + 1, _KNOWN)
        if was_known:
            change = min(max(change, -_FAR), _FAR)
        # The very first plain step is often slow: the second one is taken for the truth.
        return change if index == 0 and count == 2 else change / count

    def _forget_bad_luck(self) -> None:
        """After a plain step, wide ones are believed to take a little less."""
        for index in self._timed_indices()[1:]:
            above = self._timed[index] / (self._timed[0] * self._expected[index])
            if above > 1:
                half_life = _HALVING * int(_ALL[index]) * self._counts[index] ** 2
                self._timed[index] *= above ** (0.5 ** (1 / half_life) - 1)

    def _fitted(self) -> list[float]:
        """The seconds by index: what was timed, and after it the shape that is expected."""
        indices, plain = self._timed_indices(), self._timed[0]
        last = indices[-1]
        heights = np.array(_rising([self._timed[index] for index in indices])) / plain
        costs = np.interp(_ALL, _ALL[indices], heights)
        costs[last + 1 :] = heights[-1] + np.cumsum(self._rises_after(last, heights[-1]))
        seconds: list[float] = (plain * costs).tolist()
        return seconds

    def _rises_after(self, last: int, height: float) -> NDArray[np.float64]:
        """What each width after the last timed one costs more than the one before it.

        That is steeper or flatter than expected by as much as the last timed width was.
        """
        rises: NDArray[np.float64] = np.diff(self._expected[last:])
        if last:
            queries = _ALL[last] - 1
            seen, expected = height - 1, self._expected[last] - 1
            steeper = (seen + _FLAT * queries) / (expected + _FLAT * queries)
            least = seen / queries / 2  # A query costs no less at once than half of this.
            rises = np.maximum(steeper * rises, least * np.diff(_ALL[last:]))
        return rises


def _index(width: int) -> int:
    """The index of the time of a width."""
    return _INDICES[min(width, len(_INDICES) - 1)]


def _rising(seconds: Sequence[float]) -> list[float]:
    """What is timed too slow is believed to take no longer than what is wider.

    The first one stays as it is, and none is below it.

    >>> _rising([1.0, 3.0, 2.0, 4.0])
    [1.0, 2.0, 2.0, 4.0]
    """
    plain, *others = seconds
    least_to_the_right = np.minimum.accumulate(others[::-1])[::-1]
    return [plain, *np.maximum(least_to_the_right, plain).tolist()]
