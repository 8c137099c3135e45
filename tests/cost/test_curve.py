"""A curve never falls, no odd step bends it, and where only a shape is expected, steps teach it."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selfspec.cost import WIDTHS, CostCurve
from selfspec.cost import curve as curve_module
from tests.lossless.same import in_threads

times = st.floats(1e-5, 10.0)
wider = st.sampled_from(WIDTHS) | st.integers(1, 80)
measured = st.builds(
    lambda plain, points: {**points, 1: plain}, times, st.dictionaries(wider, times, max_size=10)
)

TYPICAL = {1: 1.0, 2: 1.02, 4: 1.08, 8: 1.2, 16: 1.5, 32: 1.9, 64: 3.0}


# -- shape -------------------------------------------------------------------------------------


@given(measured)
def test_a_curve_never_falls_and_wide_steps_never_make_plain_ones_dearer(points):
    curve = CostCurve(points)
    seconds = [curve.seconds(width) for width in range(1, 100)]
    assert seconds == sorted(seconds) == curve.table(99)[1:]
    assert curve.seconds(1) == pytest.approx(points[1])
    if set(points) <= set(WIDTHS):
        for width in points.keys() - {1}:
            least = min(seconds for wider, seconds in points.items() if wider >= width)
            assert curve.seconds(width) == pytest.approx(max(points[1], least))


def test_what_lies_between_two_widths_costs_as_the_wider_one():
    curve = CostCurve({1: 1.0, 2: 1.0, 4: 2.0, 8: 2.4})
    assert [curve.seconds(width) for width in (1, 2, 3, 4, 5, 7)] == pytest.approx(
        [1.0, 1.0, 2.0, 2.0, 2.2, 2.4]
    )
    # The whole curve rises by 0.2 a query, and so it goes on.
    assert curve.seconds(14) == curve.seconds(16) == pytest.approx(2.4 + 8 * 0.2)
    assert curve.ends(7) == [1, 2, 4, 6, 7]
    assert curve.relative(4) == pytest.approx(2.0)
    assert curve.widths == (1, 2, 4, 8)


def test_one_point_promises_nothing():
    """A tree of w nodes costs w forwards, and no tree brings more tokens than that."""
    curve = CostCurve({1: 0.5})
    assert [curve.seconds(width) for width in (1, 2, 7)] == pytest.approx([0.5, 1.0, 4.0])


# -- refining ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 8, 16, 64])
@pytest.mark.parametrize("factor", [100.0, 0.01, 1e12])
def test_one_outlier_changes_nothing_noticeable(width, factor):
    curve = CostCurve(TYPICAL)
    before = curve.table(100)
    feed(curve, [(width, factor * curve.seconds(width))], times=1)
    assert curve.table(100)[1:] == pytest.approx(before[1:], rel=0.03)


def feed(curve: CostCurve, steps: list[tuple[int, float]], times: int) -> None:
    for _ in range(times):
        for width, seconds in steps:
            curve.refine(width, seconds)


@pytest.mark.parametrize("new_curve", [lambda: CostCurve(TYPICAL), lambda: CostCurve.unknown(0.2)])
def test_noise_and_a_tenth_of_wild_steps_leave_the_median(new_curve):
    curve, rng = new_curve(), random.Random(5)
    for _ in range(4000):
        width = rng.choice([1, 4, 8, 16])
        noise = 50.0 if rng.random() < 0.1 else rng.lognormvariate(0, 0.05)
        curve.refine(width, noise * TYPICAL[width])
    for width in (1, 4, 8, 16):
        assert curve.seconds(width) == pytest.approx(TYPICAL[width], rel=0.1)
        assert curve.relative(width) == pytest.approx(TYPICAL[width], rel=0.1)


def test_each_step_belongs_to_the_width_that_it_costs_as_much_as():
    curve = CostCurve({1: 1.0, 8: 1.4})
    feed(curve, [(20, 1.6)], times=20)
    assert curve.widths == (1, 8, 24)
    assert curve.seconds(24) == pytest.approx(1.6, rel=0.02)
    feed(curve, [(7, 1.4), (10**9, 5.0)], times=1)
    assert curve.widths == (1, 8, 24, 4096)


@given(measured, st.lists(st.tuples(st.integers(1, 200), st.floats()), max_size=40))
@example({1: 1.0}, [(2, 5e-324), (1, 1e308)])
def test_no_steps_bend_a_curve_out_of_shape(points, steps):
    curve = CostCurve(points)
    feed(curve, steps, times=8)
    table = curve.table(300)[1:]
    assert table == sorted(table)
    assert table[0] > 0
    assert math.isfinite(table[-1])


def test_steps_of_several_threads_all_count(monkeypatch):
    """Though each gives the others a turn in the middle of its step."""

    def exp(value: float) -> float:
        time.sleep(0)
        return math.exp(value)

    yielding = SimpleNamespace(exp=exp, log=math.log, inf=math.inf)
    monkeypatch.setattr(curve_module, "math", yielding)
    curve, alone = CostCurve(TYPICAL), CostCurve(TYPICAL)
    step = (8, 1e9)  # so far off that every one of them moves the curve
    feed(alone, [step], times=400)
    in_threads(lambda _: feed(curve, [step], times=100), 4, 4)
    assert curve.table(64) == alone.table(64)


Steps = tuple[tuple[int, float], ...]
PLAIN: Steps = ((1, 1.0), (1, 1.0))


def fed(curve: CostCurve, *steps: tuple[int, float]) -> CostCurve:
    for width, seconds in steps:
        curve.refine(width, seconds)
    return curve


def guessed(*steps: tuple[int, float], slope: float = 0.2) -> CostCurve:
    return fed(CostCurve.unknown(slope), *steps)


def test_before_any_step_it_is_a_guess():
    curve = CostCurve.unknown(0.2)
    assert [curve.relative(width) for width in (1, 2, 12)] == pytest.approx([1.0, 1.2, 3.2])
    assert not curve.knows_plain


def test_the_second_plain_step_sets_the_scale_and_the_shape_stays():
    for start in (CostCurve.unknown(0.2), CostCurve({1: 7.0, 2: 8.4, 64: 14.0}, is_timed=False)):
        curve = fed(start, (1, 0.5))
        assert not curve.knows_plain
        curve.refine(1, 0.1)
        assert curve.knows_plain
        assert curve.seconds(1) == pytest.approx(0.1)
        assert curve.seconds(2) == pytest.approx(0.12)


FIRST_STEPS_SLOW: Steps = ((1, 0.080), (1, 0.084), (1, 0.075), *[(1, 0.058)] * 20)
# What was hoped of wide steps once pooled with plain ones, and drafts looked too cheap.
WIDE_STEPS_CHEAP: Steps = (*PLAIN, *[(2, 0.5), (4, 0.6)] * 10)


@pytest.mark.parametrize(
    ("steps", "width", "seconds"),
    [
        (FIRST_STEPS_SLOW, 1, (0.055, 0.061)),
        ((*FIRST_STEPS_SLOW, (1, 0.58)), 1, (0.055, 0.064)),  # one slow moment
        ((*PLAIN, (4, 3.0)), 4, (2.5, 3.0)),
        ((*PLAIN, (4, 3.0), (4, 3.0)), 4, (2.85, 3.15)),  # what was timed twice is believed
        (WIDE_STEPS_CHEAP, 1, (1.0, 1.0)),
        (WIDE_STEPS_CHEAP, 4, (1.0, 1.0)),
        ((*PLAIN, (4, 10.0), *[(4, 1.2)] * 4), 4, (1.0, 2.0)),  # one slow moment ends no tries
        # Behind the widest step the shape is as steep as it turned out.
        ((*PLAIN, *[(4, 4.0)] * 10), 14, (13.3, 16.3)),
        ((*PLAIN, *[(4, 1.0)] * 10), 14, (1.0, 1.3)),
    ],
)
def test_what_steps_teach(steps, width, seconds):
    least, most = seconds
    assert least * 0.999 <= guessed(*steps).seconds(width) <= most * 1.001


def test_a_wrong_shape_is_overturned_by_a_few_steps():
    """A curve from disk says that four queries cost what one does; in truth they cost four."""
    kept = CostCurve({1: 0.1, 4: 0.1, 16: 0.2}).of_other_length()
    curve = fed(kept, (1, 0.1), (1, 0.1), (4, 0.4), (4, 0.4))
    assert curve.relative(4) == pytest.approx(4.0, rel=0.1)
    assert curve.relative(2) > 1.8
    assert curve.relative(16) > 8.0


def test_nothing_is_found_out_by_a_leap():
    """However cheap wide steps are believed to be, those between come first."""
    assert guessed(*PLAIN).widest_within(2.0, 64) == 4
    assert guessed(*PLAIN, slope=0.01).widest_within(2.0, 64) == 4
    wider = guessed(*PLAIN, *[(4, 1.0)] * 3)
    limits = [(2.0, 64), (0.9, 64), (9.0, 6)]
    assert [wider.widest_within(*each) for each in limits] == [12, 1, 6]


def test_a_curve_of_another_time_takes_its_scale_from_the_first_plain_step():
    curve = guessed(*[(1, 0.05), (4, 0.08)] * 20)
    later = curve.of_other_length()
    assert not later.knows_plain
    later = fed(later, (1, 0.10))  # On a machine that is busy now.
    assert later.knows_plain
    assert later.seconds(4) == pytest.approx(0.16, rel=0.05)
