"""Every product that can be turned is, whatever a clock would say."""

from __future__ import annotations

from typing import Any

import pytest

from selfspec import products
from selfspec.plugin.turns import Table, Turns


@pytest.fixture(autouse=True)
def all_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums come out rounded otherwise wherever they ever may."""

    def table(_turns: Turns, model: Any) -> Table:
        return dict.fromkeys(products.products_of(model), products.NUM_TOKENS)

    monkeypatch.setattr(products, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(Turns, "table", table)
