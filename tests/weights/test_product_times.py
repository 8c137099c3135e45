"""Which format is chosen, and whether packing pays, follows from the times of products."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from selfspec.weights import product_times as module
from selfspec.weights.formats import reorder
from selfspec.weights.product_times import ProductTimes, product_times
from tests.fakes import packs_here

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")


def clocked(monkeypatch: pytest.MonkeyPatch, *shares: float) -> list[torch.Tensor]:
    """Packed products of one token and of several take these shares of the own ones' second."""

    def seconds(products: list[Any], inputs: list[torch.Tensor]) -> float:
        return 1.0 if hasattr(products[0], "func") else shares[len(inputs[0]) > 1]

    monkeypatch.setattr(module, "_seconds", seconds)
    return list(torch.randn(3, 24, 16))


def test_timing_runs_here_and_draws_nothing():
    weights, before = list(torch.randn(3, 24, 16)), torch.get_rng_state()
    found = product_times(weights)
    assert min(found.plain) > 0
    assert found.pays in (True, False)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("shares", "pays"),
    [
        ((0.5, 0.5), True),
        ((0.95, 0.95), False),
        ((1.5, 0.3), False),  # A single token is faster as it is.
        ((1.1, 0.3), True),
    ],
)
def test_weights_are_packed_where_that_is_faster(shares, pays, monkeypatch):
    assert product_times(clocked(monkeypatch, *shares)).pays == pays


def test_weights_that_no_format_can_hold_are_never_faster():
    """As those with a NaN, of which there is no float16 copy."""
    assert not ProductTimes(reorder, (1.0, 1.0), (math.inf, math.inf)).pays
