"""A swap of a function lasts as long as anybody is inside, and is never made twice."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from selfspec.compat.swapped import swapped


def ours(before: Any) -> Any:
    return "ours", before


def test_the_last_one_to_leave_puts_the_value_back() -> None:
    owner = {"f": "stock"}
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(swapped(owner, "f", ours))
        inside = owner["f"]
        assert inside == ("ours", "stock")
        second.enter_context(swapped(owner, "f", ours))
        assert owner["f"] is inside
        first.close()
        assert owner["f"] is inside
    assert owner == {"f": "stock"}


@pytest.mark.parametrize("again", [False, True])
def test_what_others_put_there_meanwhile_stays(again: bool) -> None:
    owner = {"f": "stock"}
    with swapped(owner, "f", ours):
        owner["f"] = "theirs"
        if again:
            with swapped(owner, "f", ours):
                assert owner["f"] == ("ours", "theirs")
    assert owner == {"f": "theirs"}
    with swapped(owner, "f", ours):
        del owner["f"]
    assert owner == {}


def test_owners_and_names_are_told_apart_and_an_error_ends_a_swap() -> None:
    first, second = {"f": 1, "g": 2}, {"f": 1}

    def fail_inside() -> None:
        with swapped(first, "f", ours):
            assert (first, second) == ({"f": ("ours", 1), "g": 2}, {"f": 1})
            with swapped(second, "f", ours):
                pass
            assert second == {"f": 1}
            raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        fail_inside()
    assert first == {"f": 1, "g": 2}
