"""Every product that can be computed otherwise is, whatever a clock would say."""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle, islice

import pytest

from selfspec import products
from selfspec.native import projects
from selfspec.packed import settles
from selfspec.plugin.turns import Turns
from selfspec.products import NATIVE, NUM_TOKENS, PACKED, TURNED, Product, Products, Table
from tests.fakes import packs_here


@pytest.fixture(autouse=True)
def all_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums come out rounded otherwise wherever they ever may, by each way in turn."""

    def table(
        _turns: Turns, found: Products, allowed: Collection[str], *, settled: bool = False
    ) -> Table:
        return {
            product: tuple(islice(cycle(_there_are(product, allowed, settled)), len(NUM_TOKENS)))
            for product in found
        }

    monkeypatch.setattr(products, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(Turns, "table", table)


def _there_are(product: Product, allowed: Collection[str], settled: bool) -> list[str]:
    is_there = {
        PACKED: packs_here(product.dtype),
        NATIVE: projects(product.dtype, product.in_features),
        TURNED: not (settled and settles(product.dtype)),
    }
    return [name for name in allowed if is_there.get(name, True)]
