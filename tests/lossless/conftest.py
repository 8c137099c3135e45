"""Nothing hangs on a clock: what a tiny model costs today says nothing about the text.

Budgets go by an even curve, and every product that can be turned is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from selfspec import products
from selfspec.cost import CostCurve
from selfspec.plugin import costs
from selfspec.plugin.turns import Table, Turns


class EvenCurve(CostCurve):
    """Wide forwards cost little more than narrow ones, whatever real steps say."""

    def refine(self, width: int, seconds: float) -> None:
        """Ignored."""


@pytest.fixture
def measuring() -> Any:
    """Measures for real, for the tests that ask for it."""
    return costs._measured


@pytest.fixture(autouse=True)
def even_costs(
    request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees are as wide as in a test before, on whatever machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if "measuring" in request.fixturenames:
        return

    def measured(_backend: Any, _num_rows: int, widths: Sequence[int], *_args: Any) -> CostCurve:
        return EvenCurve({width: 1 + width / 100 for width in widths})

    monkeypatch.setattr(costs, "_measured", measured)


@pytest.fixture(autouse=True)
def all_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums come out rounded otherwise wherever they ever may."""

    def table(_turns: Turns, model: Any) -> Table:
        return dict.fromkeys(products.products_of(model), products.NUM_TOKENS)

    monkeypatch.setattr(products, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(Turns, "table", table)
