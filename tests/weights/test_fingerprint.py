"""A copy is used only for the weight that it was made of, inside, and in one thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.weights.copies import Origin, PackedCopy, StandIns, linears_of
from tests.weights.test_packing import as_training_does, to_other_memory

X = torch.ones(1, 16)


class Negative:
    """A packed matrix that is wrong on purpose, which shows where it is used."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.clone()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return -linear(x, self._weight, bias)

    def unpacked(self) -> torch.Tensor:
        return self._weight


def layer_with_copy(least_tokens: int = 1) -> tuple[nn.Linear, dict[nn.Linear, PackedCopy]]:
    layer = nn.Linear(16, 24).requires_grad_(False)
    made = PackedCopy(Origin.of(layer.weight), Negative(layer.weight), least_tokens)
    return layer, {layer: made}


def test_it_is_used_inside_alone():
    (layer, copies), stand_ins = layer_with_copy(), StandIns()
    right = layer(X)
    with stand_ins.put([layer], copies):
        assert torch.equal(layer(X), -right)
        with stand_ins.put([layer], {}):
            assert torch.equal(layer(X), right)
        assert torch.equal(layer(X), -right)
    assert torch.equal(layer(X), right)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("least", [1, 2])
def test_it_is_used_where_it_is_faster(least):
    layer, copies = layer_with_copy(least)
    for num_tokens in (1, 2, 64):
        x = torch.ones(num_tokens, 16)
        sign = -1 if num_tokens >= least else 1
        with StandIns().put([layer], copies):
            found = layer(x)
        assert torch.equal(found, sign * layer(x))


@pytest.mark.parametrize("change", [as_training_does, to_other_memory])
def test_a_weight_that_changes_during_a_call_is_used_itself(
    change: Callable[[torch.Tensor], None],
):
    layer, copies = layer_with_copy()
    with StandIns().put([layer], copies):
        change(layer.weight)
        assert torch.equal(layer(X), linear(X, layer.weight, layer.bias))


def test_a_forward_that_comes_meanwhile_stays():
    layer, copies = layer_with_copy()

    def theirs(x: torch.Tensor) -> str:
        return "theirs"

    with StandIns().put([layer], copies):
        vars(layer)["forward"] = theirs
    assert layer(X) == "theirs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 15), (5, 16), (40, 6), (1, 17), (33, 34)], ids=str)
def test_every_value_that_changes_or_moves_is_seen(shape, dtype):
    whole = torch.randn(shape[0] * shape[1] + 3, dtype=dtype)
    weight = whole[3:].view(shape)  # Its first value lies at an odd place.
    origin, kept = Origin.of(weight), weight.clone()
    assert Origin.of(weight) == origin
    for row, column in ((0, 0), (-1, -1), (shape[0] // 2, 1)):
        weight.data[row, column] *= -1
        assert Origin.of(weight) != origin
        weight.data[row, column] *= -1
    for dim, size in enumerate(shape):
        for distance in range(1, size):
            weight.data.copy_(kept.roll(distance, dim))
            assert Origin.of(weight) != origin
    weight.data.copy_(kept)
    assert Origin.of(weight) == origin
    assert Origin.of(weight.clone()) != origin


def test_what_only_looks_like_a_linear_layer_is_left_alone():
    class Special(nn.Linear):
        pass

    hooked = nn.Linear(16, 24)
    vars(hooked)["forward"] = lambda x: x
    assert linears_of(nn.Sequential(Special(16, 24), hooked, nn.ReLU())) == []
    compiled = nn.Sequential(nn.Linear(16, 24))
    compiled._compiled_call_impl = lambda x: x  # type: ignore[assignment]
    assert linears_of(compiled) == []
