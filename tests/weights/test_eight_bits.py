"""Weights in 8 bits: a token gets the same bits whatever is beside it; nothing is lost unseen."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.errors import UnsupportedError
from selfspec.weights import eight_bits
from selfspec.weights.copies import PackedWeight
from selfspec.weights.eight_bits import EightBits, Numbers, _Matrix

pytestmark = pytest.mark.skipif(
    eight_bits.missing_for_eight_bits() is not None, reason="no products of 8 bits here"
)
SIZES = (24, 16, 40)  # The rows of three layers that get the same input.


def layers(num_in: int = 50, sizes: tuple[int, ...] = SIZES) -> tuple[list[Any], list[Numbers]]:
    torch.manual_seed(0)
    weights = [torch.randn(size, num_in) for size in sizes]
    matrix = _Matrix(Numbers.of(*weights), sizes)
    copies = [EightBits(matrix, which) for which in range(len(sizes))]
    return copies, [Numbers.of(weight) for weight in weights]


def rounded(weight: Numbers) -> torch.Tensor:
    return weight.numbers * weight.scale[:, None]


def test_it_is_nearly_the_product_with_the_rounded_weight():
    copies, weights = layers()
    x = torch.randn(2, 5, 50) * torch.tensor([1e-3, 1.0, 1.0, 1e3, 0.0])[:, None]
    for each, weight in zip(copies, weights, strict=True):
        straight = linear(x.double(), rounded(weight).double())
        off = (each(x, None) - straight).abs().amax(-1)
        assert (off <= 1e-4 * straight.abs().amax(-1)).all()
        assert each(x, None).shape == straight.shape


@pytest.mark.parametrize("num_in", [16, 50, 576])
def test_a_token_gets_the_same_bits_alone_and_among_others(num_in):
    copies, _ = layers(num_in)
    x = torch.randn(150, num_in)
    for each in copies:
        whole = each(x, None)
        for number in (1, 2, 3, 8, 31, 64, 65, 128):
            assert torch.equal(each(x[:number].clone(), None), whole[:number])


def test_layers_that_are_computed_at_once_get_what_they_get_alone():
    copies, weights = layers()
    bias, x = torch.randn(SIZES[1]), torch.randn(3, 50)
    for which, (each, weight) in enumerate(zip(copies, weights, strict=True)):
        alone = EightBits(_Matrix(weight, [len(weight.scale)]), 0)
        given = bias if which == 1 else None
        assert torch.equal(each(x, given), alone(x, given))
    assert eight_bits._last.outcome is None


def test_an_input_that_was_written_is_another_one():
    """Also where a caller wrote into what it got, and where torch counts no writes."""
    (first, second, _), _ = layers()
    x = torch.randn(3, 50)
    before = first(x, None).clone()
    x.mul_(2)
    assert torch.equal(first(x, None), 2 * before)
    second(x, None).zero_()
    assert second(x, None).any()
    with torch.inference_mode():
        x = torch.randn(3, 50)
        before = first(x, None).clone()
        x.mul_(2)
        assert torch.equal(first(x, None), 2 * before)


def test_numbers_that_are_none_stay_so():
    (each, *_), _ = layers()
    x = torch.ones(3, 50)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    outcome = each(x, None)
    assert not outcome[:2].isfinite().any()
    assert outcome[2].isfinite().all()


def module(kept: str | None = "it can't be written") -> tuple[nn.Linear, Numbers]:
    (each,), (weight,) = layers(sizes=(24,))
    made = nn.Linear(50, 24)
    made.weight = PackedWeight.of(made.weight, each, kept)
    return made.requires_grad_(False), weight


def test_all_forms_of_the_call_compute_from_it():
    made, _ = module()
    x, weight, bias = torch.randn(3, 50), made.weight, made.bias
    expected = made(x)
    assert torch.equal(linear(x, weight, bias=bias), expected)
    assert torch.equal(linear(x, weight) + bias, expected)
    assert torch.equal(linear(x[0], weight, bias), expected[0])


def test_its_values_can_be_read_and_not_written():
    made, weight = module()
    assert torch.equal(made.weight.detach(), rounded(weight))
    assert torch.equal(made.state_dict()["weight"], rounded(weight))
    assert made.to("cpu").float() is made
    for write in (made.half, made.weight.zero_, lambda: made.weight.data):
        with pytest.raises(UnsupportedError, match="it can't be written"):
            write()
    assert type(made.weight) is PackedWeight


def test_copies_and_pickles():
    made, weight = module()
    assert type(copy.deepcopy(made).weight) is PackedWeight
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert type(read.weight) is nn.Parameter
    assert torch.equal(read.weight, rounded(weight))


def test_gradients_and_autocast_go_through_the_rounded_weight():
    made, weight = module()
    x = torch.randn(3, 50, requires_grad=True)
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, rounded(weight).sum(0).expand(3, -1))
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype is torch.bfloat16


def test_a_cpu_that_cuts_sums_off_and_a_torch_without_products(monkeypatch):
    def cut_off(*arguments: Any) -> torch.Tensor:
        return torch.zeros(2 * 4, 64)

    def missing(*arguments: Any) -> torch.Tensor:
        raise NotImplementedError

    for product, reason in ((cut_off, "VNNI"), (missing, "this build of torch has no products")):
        monkeypatch.setattr(eight_bits, "int8_product", product)
        eight_bits.missing_for_eight_bits.cache_clear()
        assert reason in str(eight_bits.missing_for_eight_bits())
    monkeypatch.undo()
    eight_bits.missing_for_eight_bits.cache_clear()
