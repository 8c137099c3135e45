"""A curve of which only a shape is expected: it learns from the steps, and soon knows better."""

from __future__ import annotations

import threading

import pytest

from selfspec.cost import CostCurve


def fed(curve: CostCurve, *steps: tuple[int, float]) -> CostCurve:
    for width, seconds in steps:
        curve.refine(width, seconds)
    return curve


def guessed(*steps: tuple[int, float], slope: float = 0.2) -> CostCurve:
    return fed(CostCurve.unknown(slope), *steps)


def expected(relative: dict[int, float], *steps: tuple[int, float]) -> CostCurve:
    return fed(CostCurve(relative, is_timed=False), *steps)


PLAIN = ((1, 1.0), (1, 1.0))


def test_before_any_step_it_is_a_guess():
    curve = CostCurve.unknown(0.2)
    assert [curve.relative(width) for width in (1, 2, 12)] == pytest.approx([1.0, 1.2, 3.2])
    assert not curve.knows_plain


def test_the_second_plain_step_sets_the_scale_and_the_shape_stays():
    for curve in (guessed((1, 0.5)), expected({1: 7.0, 2: 8.4, 64: 14.0}, (1, 0.5))):
        assert not curve.knows_plain
        curve.refine(1, 0.1)
        assert curve.knows_plain
        assert curve.seconds(1) == pytest.approx(0.1)
        assert curve.seconds(2) == pytest.approx(0.12)


def test_slow_first_steps_are_soon_forgotten():
    curve = guessed((1, 0.080), (1, 0.084), (1, 0.075), *[(1, 0.058)] * 20)
    assert curve.seconds(1) == pytest.approx(0.058, rel=0.05)
    curve.refine(1, 0.580)  # One slow moment.
    assert curve.seconds(1) < 0.064


def test_what_was_timed_twice_is_believed():
    curve = guessed(*PLAIN, (4, 3.0))
    assert 2.5 < curve.seconds(4) < 3.0
    curve.refine(4, 3.0)
    assert curve.seconds(4) == pytest.approx(3.0, rel=0.05)


def test_cheap_wide_steps_never_make_plain_ones_cheaper_nor_dearer():
    """What was hoped of wide steps once pooled with plain ones, and drafts looked too cheap."""
    curve = guessed(*PLAIN, *[(2, 0.5), (4, 0.6)] * 10)
    assert curve.seconds(1) == pytest.approx(1.0)
    assert curve.seconds(4) == pytest.approx(1.0)


def test_one_slow_moment_does_not_end_all_tries():
    curve = guessed(*PLAIN, (4, 10.0), *[(4, 1.2)] * 4)
    assert curve.relative(4) < 2.0


def test_behind_the_widest_step_the_shape_is_as_steep_as_it_turned_out():
    steep = guessed(*PLAIN, *[(4, 4.0)] * 10)
    assert steep.seconds(14) == pytest.approx(4.0 + 12 * 0.9, rel=0.1)
    flat = guessed(*PLAIN, *[(4, 1.0)] * 10)
    assert flat.seconds(14) < 1.3


def test_a_wrong_shape_is_overturned_by_a_few_steps():
    """A curve from disk says that four queries cost what one does; in truth they cost four."""
    kept = CostCurve({1: 0.1, 4: 0.1, 16: 0.2}).reopened()
    curve = fed(kept, (1, 0.1), (1, 0.1), (4, 0.4), (4, 0.4))
    assert curve.relative(4) == pytest.approx(4.0, rel=0.1)
    assert curve.relative(2) > 1.8
    assert curve.relative(16) > 8.0


def test_nothing_is_found_out_by_a_leap():
    """However cheap wide steps are believed to be, those between come first."""
    assert guessed(*PLAIN).widest_within(2.0, 64) == 4
    assert guessed(*PLAIN, slope=0.01).widest_within(2.0, 64) == 4
    wider = guessed(*PLAIN, *[(4, 1.0)] * 3)
    assert wider.widest_within(2.0, 64) == 8
    assert wider.widest_within(0.9, 64) == 1
    assert wider.widest_within(9.0, 6) == 6


def test_a_curve_of_another_time_takes_its_scale_from_the_first_plain_steps():
    curve = guessed(*[(1, 0.05), (4, 0.08)] * 20)
    later = fed(curve.reopened(), (1, 0.10), (1, 0.10))  # On a machine that is busy now.
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
