"""How many functions a call goes through."""

from __future__ import annotations

from eval.functions import counted
from tests.fakes import new_model


def test_functions_are_counted_to_the_first_token_and_in_a_step() -> None:
    first, step, steps = counted(new_model(), 32)
    assert 100 < first["functions"] < 250
    assert 100 < step["functions"] <= steps["functions"] < 300
    assert max(row["deep"] for row in (first, step, steps)) < 20
