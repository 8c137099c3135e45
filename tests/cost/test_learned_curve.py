"""A curve that starts from a guess: it learns from the steps, and soon knows what they cost."""

from __future__ import annotations

import json
import random
import sys
import threading

import pytest

from selfspec.cost import CostCurve, SteppedCurve


def fed(*steps: tuple[int, float], slope: float = 0.2) -> CostCurve:
    curve = CostCurve.unknown(slope)
    for width, seconds in steps:
        curve.refine(width, seconds)
    return curve


def test_before_any_step_it_is_a_guess():
    curve = CostCurve.unknown(0.2)
    assert [curve.relative(width) for width in (1, 2, 11)] == pytest.approx([1.0, 1.2, 3.0])
    assert not curve.knows_plain
    assert curve.widest_seen == 1


def test_the_second_plain_step_sets_the_scale():
    curve = fed((1, 0.5))
    assert not curve.knows_plain
    curve.refine(1, 0.1)
    assert curve.knows_plain
    assert curve.seconds(1) == pytest.approx(0.1)
    assert curve.seconds(6) == pytest.approx(0.2)


def test_a_width_gets_a_point_when_it_is_used():
    curve = fed((1, 1.0), (1, 1.0), (4, 3.0))
    assert curve.widths == (1, 4)
    assert curve.widest_seen == 4
    assert 2.0 < curve.seconds(4) < 3.0  # Not quite believed yet.
    for _ in range(10):
        curve.refine(4, 3.0)
    assert curve.seconds(4) == pytest.approx(3.0)
    curve.refine(5, 3.0)  # So near to 4 that it belongs to its point.
    assert curve.widths == (1, 4)


def test_one_slow_moment_does_not_end_all_tries():
    curve = fed((1, 1.0), (1, 1.0), (4, 10.0))
    for _ in range(4):
        curve.refine(4, 1.2)
    assert curve.relative(4) < 2.0


def test_behind_the_widest_step_it_is_half_a_guess():
    steep = fed((1, 1.0), (1, 1.0), *[(4, 4.0)] * 10)
    assert steep.seconds(14) == pytest.approx(4.0 + 10 * 0.6)
    flat = fed((1, 1.0), (1, 1.0), *[(4, 1.0)] * 10)
    assert flat.seconds(14) == pytest.approx(1.0 + 10 * 0.2)


def test_noisy_steps_lead_to_the_truth():
    rng = random.Random(3)
    curve = CostCurve.unknown(0.2)
    for _ in range(600):
        width = rng.choice([1, 2, 4, 8, 16])
        curve.refine(width, (1 + 0.1 * width) * rng.lognormvariate(0, 0.05))
    for width in (1, 2, 4, 8, 16):
        assert curve.seconds(width) == pytest.approx(1 + 0.1 * width, rel=0.08)


def test_it_comes_back_as_it_was():
    curve = fed((1, 1.0), (1, 1.0), (4, 3.0), (2, 1.4))
    again = CostCurve.from_dict(json.loads(json.dumps(curve.as_dict())))
    assert again.table(40) == pytest.approx(curve.table(40))
    assert again.as_dict() == curve.as_dict()


@pytest.mark.parametrize("damage", [{"counts": [1]}, {"counts": ["x", 2]}, {"slope": None}])
def test_what_is_no_learned_curve_is_refused(damage):
    values = fed((1, 1.0), (4, 3.0)).as_dict()
    with pytest.raises(ValueError, match="a curve must have widths and seconds"):
        CostCurve.from_dict({**values, **damage})


def test_corners_are_where_it_bends():
    assert list(fed((1, 1.0), (4, 3.0), (8, 5.0)).corners(6)) == [1, 4]
    assert list(SteppedCurve.unknown(0.01).corners(20)) == [1, 2, 4, 8, 16]


def test_other_threads_may_read_while_points_are_added():
    """A thread that reads between two changes of a point's lists must not find them uneven."""
    failures: list[Exception] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            _read_while_learning(failures)
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def _read_while_learning(failures: list[Exception]) -> None:
    curve, is_over = CostCurve.unknown(0.1), threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                assert curve.widest_seen >= 1
        except Exception as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for doublings in range(12):
        curve.refine(1 << doublings, 0.01)
    is_over.set()
    reader.join()
