"""A source that takes seconds of its own is paused, and tried again, by steps."""

from __future__ import annotations

import pytest

from selfspec.cost import SourceWorth


@pytest.mark.parametrize("num_rows", [1, 4])
def test_pauses_and_trials_are_counted_in_steps_whatever_the_number_of_rows(num_rows: int) -> None:
    worth, asked = SourceWorth(), []
    for _ in range(220):
        asked.append(worth.should_ask(lambda _seconds: 9.0))
        for _ in range(num_rows * asked[-1]):
            worth.observe(seconds=1.0, tokens=0.0)
    assert asked == [True] * 12 + [False] * 64 + [True] * 12 + [False] * 128 + [True] * 4


def test_what_costs_nothing_is_never_paused() -> None:
    worth = SourceWorth()
    for _ in range(120):
        assert worth.should_ask(lambda _seconds: 0.0)
        worth.observe(seconds=1.0, tokens=0.0)
