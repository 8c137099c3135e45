"""A layer with a rounded weight: what it computes, and what may be done with its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.errors import UnsupportedError
from selfspec.weights.held_weight import PackedWeight, hold
from selfspec.weights.rounded import RoundedMatrix, round_weight, rounding_reason

pytestmark = pytest.mark.skipif(rounding_reason(8) is not None, reason="torch has no products here")


def module(kept: str | None = "it can't be written") -> tuple[nn.Linear, RoundedMatrix]:
    torch.manual_seed(0)
    made = nn.Linear(48, 32).requires_grad_(False)
    weight = round_weight(made.weight, 8)
    assert weight is not None
    hold(made.weight, weight, kept)
    return made, weight


def test_all_forms_of_the_call_compute_from_it():
    made, _ = module()
    x, weight, bias = torch.randn(3, 48), made.weight, made.bias
    expected = made(x)
    assert torch.equal(linear(x, weight, bias=bias), expected)
    assert torch.equal(linear(x, weight) + bias, expected)
    assert torch.equal(linear(x[0], weight, bias), expected[0])


NOTHING = torch.zeros(32, 48)
SETS: list[Callable[[Any], object]] = [
    lambda made: made.weight.__setitem__(0, 0.0),
    lambda made: torch.mul(NOTHING, 2, out=made.weight),
    lambda made: made.weight.set_(NOTHING.clone()),
]
WRITES: list[Callable[[Any], object]] = [
    *SETS,
    lambda made: torch.max(NOTHING[None], 0, out=(made.weight, torch.empty(0).long())),
    nn.Linear.half,
    lambda made: made.to("meta"),
    lambda made: made.weight.zero_(),
    lambda made: nn.init.zeros_(made.weight),
    lambda made: torch._foreach_zero_([made.weight]),
    lambda made: nn.functional.relu(made.weight, inplace=True),
    lambda made: made.weight.data,
    lambda made: made.weight.untyped_storage().fill_(0),
]


def test_numbers_that_are_none_stay_so():
    made, _ = module()
    x = torch.ones(3, 48)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    outcome = made(x)
    assert not outcome[:2].isfinite().any()
    assert outcome[2].isfinite().all()


def test_its_values_can_be_read_and_not_written():
    made, weight = module()
    assert torch.equal(made.weight.detach(), weight.unpacked())
    assert torch.equal(made.state_dict()["weight"], weight.unpacked())
    assert made.to("cpu").float() is made
    assert torch.zeros(32, 48).copy_(made.weight).equal(weight.unpacked())
    with pytest.raises(ValueError, match="read-only"):
        made.weight.numpy().fill(0)
    with pytest.raises(RuntimeError, match="Creating a Parameter"):  # In torch's own words.
        nn.Parameter(made.weight)
    before = made(torch.ones(1, 48))
    for write in WRITES:
        with pytest.raises(UnsupportedError, match="it can't be written"):
            write(made)
    assert type(made.weight) is PackedWeight
    assert torch.equal(made(torch.ones(1, 48)), before)


def test_weights_that_can_be_given_back_are_given_back_by_all_that_writes():
    for write in SETS:
        made, _ = module(None)
        write(made)
        assert type(made.weight) is nn.Parameter
        assert not made.weight[0].any()
    made, weight = module(None)
    nn.utils.parametrizations.weight_norm(made)
    torch.testing.assert_close(made.weight, weight.unpacked())


def test_inputs_of_all_forms_are_taken_as_a_linear_layer_takes_them():
    made, weight = module()
    plain, whole = nn.Linear(48, 32), torch.randn(48, 96)
    plain.weight, plain.bias = nn.Parameter(weight.unpacked()), made.bias
    for x in (whole.t(), whole.t()[::2], whole[:, ::2], whole[:3, 48:], torch.randn(2, 48, 3).mT):
        assert torch.equal(made(x), made(x.contiguous()))
    for shape in ((0, 48), (2, 0, 48)):
        assert made(torch.randn(shape)).shape == plain(torch.randn(shape)).shape
    for x in (torch.randn(2, 32), torch.randn(4, 96), torch.randn(()), torch.ones(2, 48).double()):
        with pytest.raises(RuntimeError) as expected:
            plain(x)
        with pytest.raises(RuntimeError) as found:
            made(x)
        assert str(found.value) == str(expected.value)


def test_gradients_and_autocast_go_through_the_rounded_weight():
    made, weight = module()
    x = torch.randn(3, 48, requires_grad=True)
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.unpacked().sum(0).expand(3, -1))
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype is torch.bfloat16
