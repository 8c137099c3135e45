"""Budgets that hang on no clock: what a tiny model costs today says nothing about the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from selfspec.cost import CostCurve
from selfspec.plugin import costs


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
