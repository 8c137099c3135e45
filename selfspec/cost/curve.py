"""What a step costs by its width: what was timed, and behind it the shape that is expected.

Knows widths and times; not what runs, nor what is worth drafting.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

# Wider steps get no point of their own.
_WIDEST = 4096
# No step takes less or more: seconds.
_SHORTEST, _LONGEST = 1e-9, 1e9
# A width gets a point of its own if it is this many times the nearest one that was timed.
_WIDER = 1.25
# A point follows the log of the times at its width: their mean at first, then fading at this rate.
_FADE = 1 / 16
# What was expected at a width counts as much as this many steps.
_PRIOR_STEPS = 0.1
# Once a point has seen this many steps, a time farther off than by this factor counts as this far.
_KNOWN = 8
_FAR = math.log(1.25)
# What two queries took once, beyond what is expected, halves in 16 plain steps in a row. It takes
# longer in proportion to the width, since to try that again costs more, and to the square of how
# often it was seen.
_FORGET = 0.5 ** (1 / 16)
# The machine is in a slow or a fast moment if the median of the last plain steps is off by _FAR.
_NEAR_PLAIN = 3
# Plain steps tell of the machine for this many steps.
_STALE = 16
# A query is expected to cost this many plain steps at most: as where each is computed alone.
_DEAREST = 0.7
# Where both are flatter than this share of a plain step for each query, shapes are alike.
_FLAT = 0.02
# Behind twice the widest step that was timed, queries may cost this many times what is expected;
# and no step is wider than that one by more than this factor.
_RISK = 4.0
_LEAP = 8


class _Line(NamedTuple):
    """A line with corners, ready to be read: a table by width, and a slope behind its end."""

    table: list[float]  # A width is its own index, so [0] is a filler.
    slope: float

    @classmethod
    def through(cls, points: Mapping[int, float], slope: float) -> _Line:
        """Straight between points that never fall, the first of which is that of width 1."""
        widths = list(points)
        inside = np.interp(np.arange(widths[-1] + 1), widths, list(points.values()))
        return cls(np.maximum.accumulate(inside).tolist(), slope)  # It rounds, downwards at times.

    def at(self, width: int) -> float:
        last = len(self.table) - 1
        return self.table[min(width, last)] + self.slope * max(width - last, 0)


class CostCurve:
    """The seconds of a step by its width, never falling, straight between its corners.

    Timed widths cost what was timed. Behind the widest of them the curve has the shape that was
    expected, steeper or flatter by as much as the timed part turned out. What was expected goes on
    as a line behind its end, at the slope of the last piece or of the whole, whichever is steeper;
    from one point alone every further query costs as much as the first: nothing is drafted where
    nothing is known. Safe to read and refine from several threads.

    >>> curve = CostCurve({1: 0.010, 2: 0.010, 8: 0.016, 16: 0.032})
    >>> [round(1000 * curve.seconds(width)) for width in (1, 5, 8, 12, 24)]
    [10, 13, 16, 24, 48]
    """

    def __init__(self, points: Mapping[int, float], *, is_timed: bool = True) -> None:
        """From the seconds at some widths, one at least.

        If they are not timed, only what they are relative to each other is expected, and the first
        plain steps say what one is in seconds.
        """
        _check(points)
        points = {1: points[min(points)], **points}
        widths = sorted(points)
        corners = dict(zip(widths, _rising([points[w] for w in widths]), strict=True))
        plain = corners[1]
        # What was expected, in plain steps, and where that bends.
        shape = {width: height / plain for width, height in corners.items()}
        self._expected, self._corners = _Line.through(shape, _end_slope(shape)), tuple(shape)
        timed = corners if is_timed else {1: plain}
        # The seconds at each timed width, and how many steps they were learned from.
        self._points = dict(timed)
        self._counts = dict.fromkeys(timed, _KNOWN if is_timed else 0)
        self._last_plain: deque[float] = deque(maxlen=_NEAR_PLAIN)
        self._since_plain = 0
        self._lock = threading.Lock()
        self._fit = self._fitted()

    @classmethod
    def unknown(cls, slope: float) -> CostCurve:
        """A curve that knows nothing yet but what each further query may cost, in plain steps."""
        return cls({1: 1.0, 2: 1.0 + slope}, is_timed=False)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths between which the curve is straight, as it is behind the last."""
        timed = tuple(self._points)
        return (*timed, *(width for width in self._corners if width > timed[-1]))

    @property
    def knows_plain(self) -> bool:
        """Were two plain steps timed? Before, no width can be weighed against them."""
        return self._counts[1] > 1

    @property
    def slowness(self) -> float:
        """How many times longer than usual plain steps take just now; 1.0 if that can't be said."""
        if len(self._last_plain) < _NEAR_PLAIN or self._since_plain > _STALE:
            return 1.0
        slowness = median(self._last_plain) / self._points[1]
        return slowness if abs(math.log(slowness)) > _FAR else 1.0

    def corners(self, widest: int) -> Sequence[int]:
        """The widths up to `widest` between which the curve is straight."""
        return [width for width in self.widths if width <= widest]

    def seconds(self, width: int) -> float:
        """The seconds of a step of `width` >= 1 queries; a look into a list."""
        return self._fit.at(width)

    def table(self, widest: int) -> list[float]:
        """The seconds of every width up to `widest`, each at its own index; [0] is a filler."""
        fit = self._fit
        return fit.table[: widest + 1] + [fit.at(w) for w in range(len(fit.table), widest + 1)]

    def relative(self, width: int) -> float:
        """The cost in plain steps."""
        return self.seconds(width) / self.seconds(1)

    def widest_within(self, seconds: float, allowed: int) -> int:
        """The widest step up to `allowed` that should take no longer; 1 if none does.

        Beyond twice the widest step that was timed, that holds even if queries cost several times
        what is expected: nothing is found out by a leap.
        """
        timed, plain = max(tuple(self._points)), self.seconds(1)
        sure, sure_guess = self.seconds(2 * timed), self._expected.at(2 * timed)

        def risk(width: int) -> float:
            if width <= 2 * timed:
                return self.seconds(width)
            guess = plain * (self._expected.at(width) - sure_guess) / timed
            return sure + _RISK * max(self.seconds(width) - sure, guess)

        widest = min(allowed, _LEAP * timed)
        return max(bisect_right(range(1, widest + 1), seconds, key=risk), 1)

    def refine(self, width: int, seconds: float) -> None:
        """Takes in what a real step of this width took; some 20 µs.

        It is compared with the plain steps near it: a slow moment of the machine is no slow width.
        A change that lasts is followed within some 16 steps of its width. One odd step moves a
        width that is known by less than 2 %.
        """
        if not 0 < seconds < math.inf:
            return
        seconds = min(max(seconds, _SHORTEST), _LONGEST)
        with self._lock:
            point = self._point_for(min(width, _WIDEST))
            if point > 1:
                # No tree costs more than as many plain steps: what took longer was bad luck.
                seconds = min(seconds / self.slowness, width * self._points[1])
                self._since_plain += 1
            count = self._counts[point] = self._counts[point] + 1
            there = self._points[point] * self.seconds(width) / self.seconds(point)
            news = math.log(seconds) - math.log(there)
            if count > _KNOWN:
                news = min(max(news, -_FAR), _FAR)
            # The very first plain step is often slow: the second one is taken for the truth.
            is_scale = point == 1 and count <= 2
            gain = 1.0 if is_scale else max(1 / (count + _PRIOR_STEPS), _FADE)
            self._points[point] *= math.exp(gain * news)
            if point == 1:
                self._see_plain(seconds)
            self._fit = self._fitted()

    def as_dict(self) -> dict[str, Any]:
        """The corners, for JSON."""
        with self._lock:
            return {"widths": list(self.widths), "seconds": [self.seconds(w) for w in self.widths]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, is_timed: bool = True) -> CostCurve:
        """Back from `as_dict`; raises `ValueError` where that is not what the values are."""
        try:
            points = dict(zip(values["widths"], values["seconds"], strict=True))
            return cls(points, is_timed=is_timed)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"a curve must have widths and seconds (got: {error!r})") from error

    def reopened(self) -> CostCurve:
        """What to expect at another time or behind another text: the shape of this curve.

        The machine may have been busy: no query is expected to cost so much that none is tried.
        """
        plain = self.seconds(1)
        points = {
            w: min(self.seconds(w), plain * (1 + _DEAREST * (w - 1))) for w in self.widths[1:]
        }
        return type(self)({1: plain, **points}, is_timed=False)

    def _see_plain(self, seconds: float) -> None:
        """Takes in what the machine does now; what wide steps took is forgotten, if unlucky."""
        self._last_plain.append(seconds)
        in_a_row, self._since_plain = self._since_plain == 0, 0
        if not in_a_row:
            return
        plain = self._points[1]
        for width, seconds_there in self._points.items():
            above = math.log(seconds_there / (plain * self._expected.at(width)))
            if width > 1 and above > 0:
                seen = min(max(self._counts[width], 1), _KNOWN)
                self._points[width] *= math.exp(above * (_FORGET ** (2 / (width * seen**2)) - 1))

    def _point_for(self, width: int) -> int:
        """The timed width that a step belongs to; it gets one of its own where none is near."""
        near = min(self._points, key=lambda known: abs(known - width))
        if max(width, near) <= _WIDER * min(width, near):
            return near
        points = {**self._points, width: self.seconds(width)}
        self._counts[width] = 0
        self._points = dict(sorted(points.items()))
        return width

    def _fitted(self) -> _Line:
        """What was timed, and behind it the expected shape, steeper or flatter as it turned out."""
        heights = _rising(list(self._points.values()))
        corners = dict(zip(self._points, heights, strict=True))
        plain, last, expected = heights[0], max(corners), self._expected
        seen, guess = corners[last] / plain - 1, expected.at(last) - 1
        steeper = (seen + _FLAT * (last - 1)) / (guess + _FLAT * (last - 1)) if last > 1 else 1.0
        least = seen / max(last - 1, 1) / 2  # It does not level off at once.
        at = last
        for width in self._corners[bisect_right(self._corners, last) :]:
            slope = steeper * (expected.at(width) - expected.at(at)) / (width - at)
            corners[width] = corners[at] + plain * max(slope, least) * (width - at)
            at = width
        return _Line.through(corners, plain * max(steeper * expected.slope, least))


def _rising(heights: Sequence[float]) -> list[float]:
    """The first as it is; the others as near as they can be, never falling, and none below it."""
    plain, *others = heights
    return [plain, *(max(plain, each) for each in monotone(others))]


def _end_slope(corners: Mapping[int, float]) -> float:
    """What a query costs behind the last corner."""
    widths = list(corners)
    if len(widths) == 1:
        return corners[1]
    last = widths[-1]
    return max((corners[last] - corners[width]) / (last - width) for width in (1, widths[-2]))


def _check(points: Mapping[int, float]) -> None:
    if not points:
        raise ValueError("a curve must have a point at least (got none)")
    for width, seconds in points.items():
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= _WIDEST:
            raise ValueError(f"a width must be a whole number in 1 … {_WIDEST} (got {width!r})")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be > 0 and finite (got {seconds!r})")


def monotone(values: Sequence[float]) -> list[float]:
    """The never falling values that are nearest by least squares (pool adjacent violators).

    >>> monotone([1.0, 3.0, 2.0, 4.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[tuple[float, int]] = []  # The mean, and of how many values.
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            left, more = pools.pop()
            mean = (mean * count + left * more) / (count + more)
            count += more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
