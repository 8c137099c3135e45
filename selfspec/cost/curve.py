"""The seconds of a forward by its width: kept monotone, learned and refined from real steps.

Knows widths and times; not what runs, nor what is worth drafting.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from selfspec.cost.monotone import monotone

__all__ = ["CostCurve"]

# Wider forwards get no point of their own.
_WIDEST = 4096

# How a step refines the curve: the log of the time over the expected one, cut at ± _BOUND, is
# followed by the share _GAIN. So no single step moves anything by more than 1 %, and what stays
# is near the median of the steps that fade at that rate.
_GAIN = 0.1
_BOUND = 0.1
# A slow moment of the machine slows every width, and what counts is the ratio of widths. So most
# of a step's news moves the whole curve, and the rest the points beside its width.
_SHARED = 0.9
# A fit costs several times what a step's news does, so it waits for this many steps.
_REFIT_EVERY = 8
# A width that is so many times a point's gets a point of its own.
_WIDER = 1.25
# A curve that starts from a guess learns each point from the steps near it. Until a point has seen
# so many steps, it is taken for a little cheaper than it was seen, so that one slow moment does not
# end all tries of its width.
_KNOWN = 8
_HOPE = 0.2
# Plain steps are what all others are weighed against, and the first ones are often slow. So their
# point is learned from more of them; a step of them that is far off counts as this far at most.
_PLAIN_KNOWN = 32
_FAR = 1.25


class _Fit(NamedTuple):
    """A monotone curve, ready to be read: a table by width, and a line behind its end."""

    table: list[float]  # A width is its own index, so [0] is a filler.
    slope: float


class CostCurve:
    """The seconds of a forward by its width, never falling, straight between measured widths.

    Behind the widest point it goes on as a line, at the slope of the last piece or of the whole
    curve, whichever is steeper. With one point alone every further query costs as much as the
    first: nothing is drafted where nothing is known. Safe to read and refine from several
    threads.

    A curve made by `unknown` starts from a guess of what a further query costs, and gets its points
    from the steps that are run.

    >>> curve = CostCurve({1: 0.010, 2: 0.010, 8: 0.016, 16: 0.032})
    >>> [round(1000 * curve.seconds(width)) for width in (1, 5, 8, 12, 24)]
    [10, 13, 16, 24, 48]
    """

    def __init__(
        self,
        points: Mapping[int, float],
        *,
        counts: Mapping[int, int] | None = None,
        slope: float = 0.0,
    ) -> None:
        """From the seconds at some widths, one at least.

        `counts` says how many steps each point was learned from, and lets the curve learn further
        points; `slope` is what a query costs behind the last point, at least, in plain steps.
        """
        self._widths = tuple(sorted(points))
        self._points = [float(points[width]) for width in self._widths]
        self._learns = counts is not None
        self._counts = [_PLAIN_KNOWN if counts is None else counts[w] for w in self._widths]
        self._slope = slope
        _check(self._widths, self._points)
        self._news: list[tuple[int, float]] = []  # Steps that the fit does not know yet.
        self._lock = threading.Lock()
        self._fit = self._fitted()

    @classmethod
    def unknown(cls, slope: float) -> CostCurve:
        """A curve that knows nothing yet but what each further query may cost, in plain steps.

        Its seconds are in plain steps until the first one was timed.
        """
        return cls({1: 1.0}, counts={1: 0}, slope=slope)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that have a point; between two, and behind the last, the curve is straight."""
        return self._widths

    @property
    def knows_plain(self) -> bool:
        """Were two plain steps timed? Before, no width can be weighed against them."""
        return self._counts[0] > 1

    @property
    def widest_seen(self) -> int:
        """The widest forward that was timed."""
        with self._lock:  # A point that is being added is in one of the lists, not yet in both.
            known = zip(self._widths, self._counts, strict=True)
            return max(width for width, count in known if count or width == 1)

    def corners(self, widest: int) -> Sequence[int]:
        """The widths up to `widest` between which the curve is straight."""
        return [width for width in self._widths if width <= widest]

    def seconds(self, width: int) -> float:
        """The seconds of a forward of `width` >= 1 queries; a look into a list."""
        table, slope = self._fit
        last = len(table) - 1
        return table[width] if width <= last else table[last] + slope * (width - last)

    def table(self, widest: int) -> list[float]:
        """The seconds of every width up to `widest`, each at its own index; [0] is a filler."""
        table, slope = self._fit
        last, more = len(table) - 1, range(1, widest - len(table) + 2)
        return table[: widest + 1] + [table[last] + slope * number for number in more]

    def relative(self, width: int) -> float:
        """The cost in plain steps."""
        return self.seconds(width) / self.seconds(1)

    def refine(self, width: int, seconds: float) -> None:
        """Takes in what a real step of this width took; a few µs, for some steps together.

        No single one moves the curve by more than 1 %, however odd. A change that lasts is
        followed within some hundred steps, one of two widths' ratio within some hundred of each.
        """
        if not 0 < seconds < math.inf:
            return
        with self._lock:
            self._news.append((width, seconds))
            if len(self._news) >= _REFIT_EVERY or self._is_young(width):
                self._take_news()
                self._fit = self._fitted()

    def as_dict(self) -> dict[str, Any]:
        """The points, for JSON."""
        with self._lock:
            self._take_news()
            values = {"widths": list(self._widths), "seconds": list(self._points)}
            if not self._learns:
                return values
            return {**values, "counts": list(self._counts), "slope": self._slope}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostCurve:
        """Back from `as_dict`; raises `ValueError` where that is not what the values are."""
        try:
            points = dict(zip(values["widths"], values["seconds"], strict=True))
            if "counts" not in values:
                return cls(points)
            counts = dict(zip(values["widths"], map(int, values["counts"]), strict=True))
            return cls(points, counts=counts, slope=float(values["slope"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"a curve must have widths and seconds (got: {error!r})") from error

    def reopened(self) -> CostCurve:
        """A copy for another time: its first plain steps say how fast the machine is now."""
        twin = type(self).from_dict(self.as_dict())
        if twin._learns:
            twin._counts[0] = 0
        return twin

    def _take_news(self) -> None:
        for width, seconds in self._news:
            self._follow(width, seconds)
        self._news.clear()

    def _follow(self, width: int, seconds: float) -> None:
        if self._wants_point(width):
            self._add_point(width)
        nearest = self._nearest(width)
        if self._is_learning(nearest):
            self._learn(nearest, width, seconds)
        else:
            self._refine(width, seconds)

    def _nearest(self, width: int) -> int:
        """The index of the point that is nearest to a width."""
        return min(range(len(self._widths)), key=lambda i: abs(self._widths[i] - width))

    def _is_young(self, width: int) -> bool:
        """Would a step of this width tell something new?"""
        is_young = self._is_learning(self._nearest(width)) or self._wants_point(width)
        return self._learns and is_young

    def _is_learning(self, index: int) -> bool:
        return self._counts[index] < (_KNOWN if index else _PLAIN_KNOWN)

    def _wants_point(self, width: int) -> bool:
        if not self._learns:
            return _WIDEST >= width > _WIDER * self._widths[-1]
        apart = (max(width, known) / min(width, known) for known in self._widths)
        return width <= _WIDEST and min(apart) > _WIDER

    def _add_point(self, width: int) -> None:
        index = bisect_right(self._widths, width)
        self._points.insert(index, self.seconds(width))
        self._counts.insert(index, 0 if self._learns else _PLAIN_KNOWN)
        self._widths = (*self._widths[:index], width, *self._widths[index:])

    def _learn(self, index: int, width: int, seconds: float) -> None:
        """Moves a point that few steps have shown; plain ones set the scale of the others.

        The first plain step is slower than later ones: the second is taken for the truth.
        """
        count = self._counts[index] = self._counts[index] + 1
        factor = seconds / self._raw(width)
        if index == 0 and count <= 2:
            self._points = [point * factor for point in self._points]
        else:
            if count > _KNOWN:
                factor = min(max(factor, 1 / _FAR), _FAR)
            self._points[index] *= factor ** max(1 / count, _GAIN)

    def _refine(self, width: int, seconds: float) -> None:
        left, share = self._between(width)
        news = math.log(seconds) - math.log(self._raw(width))
        step = _GAIN * min(max(news, -_BOUND), _BOUND)
        shared = math.exp(_SHARED * step)
        self._points = [point * shared for point in self._points]
        self._points[left] *= math.exp((1 - _SHARED) * (1 - share) * step)
        if share:
            self._points[left + 1] *= math.exp((1 - _SHARED) * share * step)

    def _raw(self, width: int) -> float:
        """As measured and refined, before it is made monotone: pooled points would run away."""
        if width > (widest := self._widths[-1]):
            return self._points[-1] * self.seconds(width) / self.seconds(widest)
        left, share = self._between(width)
        right = self._points[left + 1] if share else 0.0
        return (1 - share) * self._points[left] + share * right

    def _fitted(self) -> _Fit:
        widths = self._widths
        hoped = [
            point * (1 - _HOPE / count) if index and 0 < count < _KNOWN else point
            for index, (point, count) in enumerate(zip(self._points, self._counts, strict=True))
        ]
        heights = monotone(hoped)
        inside = np.interp(np.arange(widths[-1] + 1), widths, heights)
        table = np.maximum.accumulate(
            inside
        ).tolist()  # It rounds, a little below a point at times.
        guess = self._slope * heights[0]
        if len(widths) == 1:
            return _Fit(table, guess if self._learns else heights[0] / widths[0])
        seen = max((heights[-1] - heights[i]) / (widths[-1] - widths[i]) for i in (0, -2))
        return _Fit(table, max(guess, (guess + seen) / 2) if self._learns else seen)

    def _between(self, width: int) -> tuple[int, float]:
        """The point at or left of a width, and how far it is on the way to the next one."""
        left = max(bisect_right(self._widths, width) - 1, 0)
        if width <= self._widths[left] or left + 1 == len(self._widths):
            return left, 0.0
        start, end = self._widths[left : left + 2]
        return left, (width - start) / (end - start)


def _check(widths: Sequence[int], points: Sequence[float]) -> None:
    if not widths:
        raise ValueError("a curve must have a point at least (got none)")
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= _WIDEST:
            raise ValueError(f"a width must be a whole number in 1 … {_WIDEST} (got {width!r})")
    for point in points:
        if not 0 < point < math.inf:
            raise ValueError(f"seconds must be > 0 and finite (got {point!r})")
