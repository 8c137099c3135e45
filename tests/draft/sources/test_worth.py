"""A source that takes seconds of its own is paused, and tried again, by steps."""

from __future__ import annotations

import pytest

from selfspec.draft.sources.worth import SourceWorth
from selfspec.records import TimeBudget


class Price(TimeBudget):
    """A second costs a token, or what is said here."""

    def __init__(self, tokens: float = 1.0, *, may_lose: bool = True) -> None:
        self.tokens, self.may_lose = tokens, may_lose

    def break_even_tokens(self, seconds: float) -> float:
        return self.tokens * seconds

    def affords(self, seconds: float | None) -> bool:
        return self.may_lose


@pytest.mark.parametrize("num_rows", [1, 4])
def test_pauses_are_counted_in_steps_whatever_the_number_of_rows(num_rows: int) -> None:
    """It is tried until it was timed; what costs more than it may bring is not tried again."""
    worth, asked = SourceWorth(), []
    for _ in range(600):
        asked.append(worth.should_ask(Price()))
        for _ in range(num_rows * asked[-1]):
            worth.observe(seconds=0.1, tokens=0.0)
    num_tried = asked.index(False)
    assert num_tried == (44 + num_rows) // num_rows
    trial = [True] * num_tried + [False] * 256
    assert asked == (3 * trial)[:600]


def test_what_costs_more_than_it_may_bring_is_asked_until_it_was_timed() -> None:
    """It is timed anew after each pause: the machine may have been busy."""
    worth, num_asked = SourceWorth(), 0
    for _ in range(600):
        if worth.should_ask(Price()):
            worth.observe(seconds=9.0, tokens=0.0)
            num_asked += 1
    assert num_asked == 9


def test_a_price_that_is_high_for_a_step_ends_nothing() -> None:
    """A step that brought many tokens raises it, whoever brought them."""
    worth = SourceWorth()
    for step in range(600):
        is_dear = step % 10 == 9
        assert worth.should_ask(Price(9.0 if is_dear else 1.0)) is not is_dear
        worth.observe(seconds=0.1, tokens=0.2)


def test_one_slow_answer_says_nothing() -> None:
    worth = SourceWorth()
    for seconds in (0.1, 9.0, 0.1, 0.1, 9.0, 0.1):
        assert worth.pays(Price(), 0.75)
        worth.observe(seconds=seconds)


def test_what_costs_nothing_is_never_paused() -> None:
    worth = SourceWorth()
    for _ in range(600):
        assert worth.should_ask(Price(0.0))
        worth.observe(seconds=1.0, tokens=0.0)


def test_what_was_never_timed_is_tried_once_drafts_may_lose() -> None:
    worth, price = SourceWorth(), Price(may_lose=False)
    assert not any(worth.should_ask(price) for _ in range(300))
    price.may_lose = True
    for _ in range(3):
        assert worth.should_ask(price)
        worth.observe(seconds=9.0)
    assert not worth.should_ask(price)
