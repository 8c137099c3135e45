"""Held weights are read as copies or given back, and what is kept can't be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.errors import UnsupportedError
from selfspec.weights.fingerprint import contents_of
from selfspec.weights.formats import reorder
from selfspec.weights.held_weight import PackedWeight, hold
from tests.fakes import packs_here
from tests.weights.test_formats import PACKINGS, needs

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")


@pytest.mark.parametrize(("packer", "dtype"), PACKINGS)
def test_a_packed_weight_is_given_back_bit_by_bit(packer, dtype):
    needs(packer, dtype)
    weight, x = torch.randn(24, 16, dtype=dtype), torch.randn(3, 16, dtype=dtype)
    module = nn.Linear(16, 24, bias=False, dtype=dtype).requires_grad_(False)
    (copy,) = packer([weight])
    assert copy is not None
    packed: Any = module.weight
    hold(packed, copy, None)
    assert (packed.shape, packed.dtype, packed.numel()) == (weight.shape, dtype, 24 * 16)
    assert not packed.requires_grad
    assert torch.equal(module(x), copy(x, None))
    assert torch.equal(module(x[0]), copy(x[:1], None)[0])
    assert type(module.weight) is PackedWeight
    assert torch.equal(torch.cat([packed, weight]), torch.cat([weight, weight]))
    assert type(packed) is nn.Parameter
    assert torch.equal(module(x), linear(x, weight))


def test_a_weight_is_not_taken_for_one_that_is_gone() -> None:
    """Python gives the address of an object that is gone to a new one."""
    weight, seen = torch.randn(24, 16), set[Any]()
    for _ in range(20):
        (copy,) = reorder([weight])
        assert copy is not None
        module = nn.Linear(16, 24, bias=False).requires_grad_(False)
        hold(module.weight, copy, "it can't be written")
        contents = contents_of([module.weight])
        assert contents_of([module.weight]) == contents
        seen.add(contents)
        del module, copy
    assert len(seen) == 20


def packed_layer(kept: str | None) -> nn.Linear:
    layer = nn.Linear(16, 24).requires_grad_(False)
    (matrix,) = reorder([layer.weight])
    assert matrix is not None
    hold(layer.weight, matrix, kept)
    return layer


def test_no_gradient_of_a_weight_is_lost():
    given_back, layer = packed_layer(None), packed_layer("it can't be trained")
    assert given_back.requires_grad_(False).weight.requires_grad is False
    assert type(given_back.weight) is PackedWeight
    given_back.requires_grad_()(torch.ones(1, 16)).sum().backward()
    assert torch.equal(given_back.weight.grad, torch.ones(24, 16))
    for train in (layer.requires_grad_, lambda: setattr(layer.weight, "requires_grad", True)):
        with pytest.raises(UnsupportedError, match="it can't be trained"):
            train()


@pytest.mark.parametrize("kept", [None, "it is kept"])
@pytest.mark.parametrize(
    "run",
    [
        lambda layer: torch.func.grad(lambda x: layer(x).sum())(torch.ones(1, 16)),
        lambda layer: torch.jit.trace(layer, torch.ones(1, 16)),
    ],
    ids=["torch.func", "torch.jit"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_transformations_and_traces_are_refused(run, kept):
    layer = packed_layer(kept)
    with pytest.raises(UnsupportedError, match=r"torch.func and torch.jit can't be given packed"):
        run(layer)
    assert type(layer.weight) is PackedWeight
