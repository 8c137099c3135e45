"""A curve of which only a shape is expected: it learns from the steps, and soon knows better."""

from __future__ import annotations

import threading

import pytest

from selfspec.cost import CostCurve

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
    assert [wider.widest_within(*each) for each in limits] == [8, 1, 6]


def test_a_curve_of_another_time_takes_its_scale_from_the_first_plain_steps():
    curve = guessed(*[(1, 0.05), (4, 0.08)] * 20)
    later = fed(curve.of_other_length(), (1, 0.10), (1, 0.10))  # On a machine that is busy now.
    assert later.seconds(4) == pytest.approx(0.16, rel=0.05)


def test_other_threads_may_read_while_points_are_added():
    curve, is_over, failures = CostCurve.unknown(0.1), threading.Event(), []

    def read() -> None:
        try:
            while not is_over.is_set():
                assert curve.widest_within(1e9, 64) >= 1
                assert curve.widths
        except Exception as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for doublings in 10 * list(range(12)):
        curve.refine(1 << doublings, 0.01)
    is_over.set()
    reader.join()
    assert failures == []
