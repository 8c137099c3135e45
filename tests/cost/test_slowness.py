"""Slow steps are bad luck once, and no more than that."""

from __future__ import annotations

import pytest

from selfspec.cost.slowness import Slowness, TimedStep


def wide(slowness: Slowness, seconds: float, plain: float = 1.0) -> float:
    """A wide step that should take 1.5 plain steps, and was charged 2."""
    return slowness.observe(TimedStep(4, seconds, 2.5, 2.0), plain)


def narrow(slowness: Slowness, seconds: float, plain: float = 1.0) -> float:
    return slowness.observe(TimedStep(1, seconds, 2.0, 1.0), plain)


def test_a_slow_step_among_others_is_never_charged_in_full():
    slowness = Slowness()
    for seconds in (14.0, 1.5, 1.5, 14.0, 2.4, 14.0, 1.5):
        assert wide(slowness, seconds) == 0
        assert not slowness.needs_plain
    assert narrow(slowness, 1.0) == 0


def test_two_slow_steps_are_charged_once_a_plain_one_was_not_slow():
    slowness = Slowness()
    assert wide(slowness, 14.0) == 0
    assert narrow(slowness, 1.0) == 0  # It tells nothing yet.
    assert wide(slowness, 10.0) == 0
    assert slowness.needs_plain
    assert narrow(slowness, 1.0) == pytest.approx(12 + 8)
    assert not slowness.needs_plain
    assert wide(slowness, 9.0) == pytest.approx(7)  # At once from now on,
    assert wide(slowness, 1.5) == 0  # until one is not slow.
    assert wide(slowness, 9.0) == 0


def test_a_machine_that_is_slow_as_a_whole_makes_no_draft_slow():
    slowness = Slowness()
    for seconds in (4.5, 4.4):
        assert wide(slowness, seconds) == 0
    assert narrow(slowness, 3.0, 1.2) == 0
    assert [wide(slowness, seconds) for seconds in (4.5, 4.6, 4.5)] == [0, 0, 0]
    assert not slowness.needs_plain


def test_a_machine_is_free_again_once_plain_steps_take_less():
    slowness = Slowness()
    assert not slowness.is_over(0.5)
    wide(slowness, 14.0), wide(slowness, 14.0)
    narrow(slowness, 1.0)
    assert not slowness.is_over(1.0)
    narrow(slowness, 1.4, 1.4)
    assert not slowness.is_over(1.2)
    assert slowness.is_over(1.0)
    assert not slowness.is_over(1.0)
