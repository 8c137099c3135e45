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
    """Packed products of 1, 8 and 64 tokens take these shares of the plain ones' second."""

    def seconds(products: list[Any], inputs: list[torch.Tensor]) -> float:
        index = {1: 0, 8: 1, 64: 2}[len(inputs[0])]
        return 1.0 if hasattr(products[0], "func") else shares[index]

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
        ((0.5, 0.5, 0.5), True),
        ((0.95, 0.95, 0.5), False),
        ((1.5, 0.3, 0.5), False),  # A single token is faster as it is.
        ((0.5, 0.5, 1.3), False),  # A prompt is.
        ((1.1, 0.3, 1.05), True),
    ],
)
def test_weights_are_packed_where_that_is_faster(shares, pays, monkeypatch):
    assert product_times(clocked(monkeypatch, *shares)).pays == pays


def test_weights_that_no_format_can_hold_are_never_faster():
    """As those with a NaN, of which there is no float16 copy."""
    assert not ProductTimes(reorder, (1.0,) * 3, (math.inf,) * 3).pays


def test_the_format_is_one_in_which_prompts_are_fast_too(monkeypatch):
    """On a CPU that calculates in bfloat16, prompts take half as long again from float16."""

    def other(weights: list[torch.Tensor]) -> list[Any]:
        return [lambda x, bias: x for _ in weights]

    monkeypatch.setattr(module, "packers_for", lambda _: (other, reorder))
    times = {other: (0.5, 0.5, 1.5), reorder: (0.7, 0.7, 0.9)}
    monkeypatch.setattr(module, "_times_of", lambda p, _: ProductTimes(p, (1.0,) * 3, times[p]))
    assert product_times(list(torch.randn(3, 24, 16))).packer is reorder
