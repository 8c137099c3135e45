"""Forwards that come in a few widths: what lies between two costs as the wider one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.cost import STEPS, CostCurve, SteppedCurve, stepped

POINTS = {1: 1.0, 2: 1.1, 4: 1.2, 8: 2.0, 16: 3.0, 32: 3.2, 64: 8.0}


def test_steps_are_powers_of_two_and_then_multiples():
    assert STEPS == (1, 2, 4, 8, 16, 32, 64)
    steps = sorted({stepped(width) for width in range(1, 257)})
    assert steps == [*STEPS, 128, 192, 256]


@given(st.integers(1, 1000))
def test_a_step_has_room_and_is_a_step(width):
    assert stepped(width) >= width
    assert stepped(stepped(width)) == stepped(width)


def test_between_two_steps_the_wider_one_is_paid():
    curve = SteppedCurve(POINTS)
    table = curve.table(80)
    assert len(table) == 81
    for width in range(1, 81):
        assert curve.seconds(width) == table[width] == curve.seconds(stepped(width))
    assert [curve.seconds(w) for w in STEPS] == pytest.approx([POINTS[w] for w in STEPS])
    assert table[65] == table[80] > table[64]


def test_a_real_step_refines_the_step_that_it_took():
    curve, other = SteppedCurve(POINTS), CostCurve(POINTS)
    for _ in range(80):
        curve.refine(11, 6.0)
        other.refine(16, 6.0)
    assert curve.as_dict() == other.as_dict()
