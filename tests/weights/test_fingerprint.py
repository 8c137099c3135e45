"""A fingerprint changes with every value, and with every weight that takes another's place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from selfspec.weights.fingerprint import Fingerprint, contents_of
from selfspec.weights.formats import reorder
from selfspec.weights.held_weight import give_back, hold
from tests.fakes import packs_here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 15), (5, 16), (40, 6), (1, 17), (33, 34)], ids=str)
def test_every_value_that_changes_or_moves_is_seen(shape, dtype):
    whole = torch.randn(shape[0] * shape[1] + 3, dtype=dtype)
    weight = whole[3:].view(shape)  # Its first value lies at an odd place.
    first, kept = Fingerprint.of(weight), weight.clone()
    assert Fingerprint.of(weight) == first
    for row, column in ((0, 0), (-1, -1), (shape[0] // 2, 1)):
        weight.data[row, column] *= -1
        assert Fingerprint.of(weight) != first
        weight.data[row, column] *= -1
    for dim, size in enumerate(shape):
        for distance in range(1, size):
            weight.data.copy_(kept.roll(distance, dim))
            assert Fingerprint.of(weight) != first
    weight.data.copy_(kept)
    assert Fingerprint.of(weight) == first
    assert Fingerprint.of(weight.clone()) != first


@pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")
def test_a_weight_that_was_trained_between_two_packings_is_another():
    """It is the same parameter, but for its matrix."""
    layer, seen = nn.Linear(16, 24, bias=False), set()
    for _ in range(3):
        (matrix,) = reorder([layer.weight.detach()])
        assert matrix is not None
        hold(layer.weight, matrix, None)
        assert contents_of(layer.parameters()) == contents_of(layer.parameters())
        seen.add(contents_of(layer.parameters()))
        give_back(layer.weight)
        layer.weight.data.mul_(2)
    assert len(seen) == 3
