"""Measures what a forward of each width costs, all widths in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter

from selfspec.cost.curve import WIDTHS, CostCurve

# Fewer measured widths make no slope.
_LEAST_WIDTHS = 2
# From this many seconds on, what a first run costs more is small beside the run itself.
_SLOW = 0.1


def measure_curve(
    run: Callable[[int], object],
    widths: Sequence[int] = WIDTHS,
    *,
    repeats: int = 5,
    max_seconds: float = 3.0,
    clock: Callable[[], float] = perf_counter,
) -> CostCurve:
    """Times `run(width)`, which returns when the work is done, in rounds over all widths.

    Each width is first run once untimed, unless it takes long anyway. Rounds, so that a slow
    moment hits every width alike; the median of a width's times, since that is what
    `CostCurve.refine` will follow: the lowest would leave out the disturbances that are usual on
    this machine, and long forwards have more of them. Stops widening, and later repeating, before
    it would take more than `max_seconds` by what the curve so far expects; two widths are measured
    in any case. Where there is no time to repeat all, the narrow ones are repeated, which most
    steps have.
    """
    end = clock() + max_seconds

    def seconds_of(width: int) -> float:
        start = clock()
        run(width)
        return max(clock() - start, 1e-9)  # A clock may be too coarse to see it.

    def has_time_for(seconds: float) -> bool:
        return clock() + seconds <= end

    times: dict[int, list[float]] = {}
    for width in sorted(set(widths)):
        expected = CostCurve(_medians(times)).seconds(width) if times else 0.0
        is_quick = expected < _SLOW
        if len(times) >= _LEAST_WIDTHS and not has_time_for((1 + is_quick) * expected):
            break
        if is_quick:
            run(width)
        times[width] = [seconds_of(width)]
    for _ in range(repeats - 1):
        for width, expected in _medians(times).items():
            if not has_time_for(expected):
                break
            times[width].append(seconds_of(width))
    return CostCurve(_medians(times))


def _medians(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {width: median(taken) for width, taken in times.items()}
