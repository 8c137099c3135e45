"""Weights in 8 bits: a token gets the same bits whatever is beside it; nothing is lost unseen."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.errors import UnsupportedError
from selfspec.weights import PackedWeight, eight_bits, rounding
from selfspec.weights.eight_bits import EightBits
from selfspec.weights.rounding import Int8Rows, Products

pytestmark = pytest.mark.usefixtures("products")

SIZES = (24, 16, 40)  # The rows of three layers that get the same input.


def packed(*given: Any) -> Products:
    return Products(eight_bits.kernels().packed, *given)


def layers(
    num_in: int = 50, sizes: tuple[int, ...] = SIZES, terms: int = 3
) -> tuple[list[Any], list[Int8Rows]]:
    torch.manual_seed(0)
    weights = [Int8Rows.of(torch.randn(size, num_in)) for size in sizes]
    matrix = packed(Int8Rows.joined(weights), sizes, terms == 1)
    return [EightBits(matrix, index) for index in range(len(sizes))], weights


@pytest.mark.parametrize(
    ("num_in", "terms", "tolerance"),
    [(50, 3, 1e-4), (64, 3, 1e-4), (50, 1, 1e-4), (64, 1, 0.02), (48, 1, 0.02)],
)
def test_it_is_nearly_the_product_with_the_rounded_weight(num_in, terms, tolerance):
    copies, weights = layers(num_in, terms=terms)
    x = torch.randn(2, 5, num_in) * torch.tensor([1e-3, 1.0, 1.0, 1e3, 0.0])[:, None]
    for each, weight in zip(copies, weights, strict=True):
        straight = linear(x.double(), weight.values().double())
        off = (each(x, None) - straight).abs().amax(-1)
        assert (off <= tolerance * straight.abs().amax(-1)).all()
        assert each(x, None).shape == straight.shape
        assert torch.equal(each.unpacked(), weight.values())


@pytest.mark.parametrize("num_in", [50, 64, 576])
def test_large_values_are_spread_before_they_are_rounded(num_in):
    """Of weights too. Without a rotation, one large column takes the steps of all others."""
    weight, x = torch.randn(24, num_in), torch.randn(5, num_in)
    weight[:, 7], x[:, 3] = 100, 100
    off = (Int8Rows.of(weight).values() - weight).square().mean().sqrt()
    assert off < (0.3 if num_in == 50 else 0.1)
    outcome = packed(Int8Rows.of(weight), [24], True).product(x)
    straight = x @ Int8Rows.of(weight).values().T
    torch.testing.assert_close(outcome, straight, rtol=0.01, atol=10)


@pytest.mark.parametrize("terms", [1, 3])
def test_no_sum_is_cut_off(terms):
    """All numbers here are as large as they get, and their sums have one sign."""
    large = torch.ones(2, 64)
    large[1] = 100 * nn.functional.one_hot(torch.tensor(7), 64)
    rounded = Int8Rows.of(large)
    found = packed(rounded, [2], terms == 1).product(large)
    torch.testing.assert_close(found, large @ rounded.values().T, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("num_in", [1, 3, 16, 50, 576])
def test_a_token_gets_the_same_bits_alone_and_among_others(num_in, terms):
    copies, _ = layers(num_in, terms=terms)
    x = torch.randn(150, num_in)
    for each in copies:
        whole = each(x, None)
        for number in (1, 2, 3, 8, 31, 64, 65, 128):
            assert torch.equal(each(x[:number].clone(), None), whole[:number])


def test_layers_with_the_same_input_share_one_product(monkeypatch):
    """They get what they get alone."""
    parts, weights = layers()
    bias, x, products = torch.randn(SIZES[1]), torch.randn(3, 50), []
    biases = (None, bias, None)
    matrices = [packed(weight, [len(weight.scale)], False) for weight in weights]
    alone = [EightBits(matrix, 0)(x, b) for matrix, b in zip(matrices, biases, strict=True)]
    product = Products.product
    monkeypatch.setattr(Products, "product", lambda *of: products.append(of) or product(*of))
    for part, b, outcome in zip(parts, biases, alone, strict=True):
        assert torch.equal(part(x, b), outcome)
    assert len(products) == 1
    assert eight_bits._this_thread.shared is None


def test_a_product_does_not_keep_its_weights():
    """Also where only some of the layers were computed, as in a forward that broke off."""
    for number in (1, 3):
        copies, _ = layers()
        for each in copies[:number]:
            each(torch.randn(3, 50), None)
        matrix = weakref.ref(copies[0]._matrix)
        del copies, each
        assert matrix() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_of_no_importance(dtype):
    (each, *_), (weight, *_) = layers(64)
    x, before = torch.randn(3, 64), torch.get_default_dtype()
    expected, values = each(x, None), weight.values()
    torch.set_default_dtype(dtype)
    rounding._rotation.cache_clear()
    eight_bits.kernels.cache_clear()
    try:
        assert eight_bits.missing_for_eight_bits() is None
        assert torch.equal(each(x, None), expected)
        assert torch.equal(weight.values(), values)
    finally:
        torch.set_default_dtype(before)
        rounding._rotation.cache_clear()


def double_data(x: torch.Tensor) -> None:
    x.data.mul_(2)


def double_array(x: torch.Tensor) -> None:
    array = x.numpy()
    array *= 2


def other_data(x: torch.Tensor) -> None:
    x.data = 2 * x


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("double", [lambda x: x.mul_(2), double_data, double_array, other_data])
def test_an_input_that_was_written_is_another_one(double, is_inference):
    """Also where torch counts no writes, and where a caller wrote into what it got."""
    (first, second, third), _ = layers()
    with torch.inference_mode(is_inference):
        x = torch.randn(3, 50)
        expected, before = second(2 * x, None).clone(), first(x, None)
        double(x)
        assert torch.equal(second(x, None), expected)
        assert torch.equal(first(x, None), 2 * before)
        third(x, None).zero_()
        assert third(x, None).any()


def test_what_was_computed_in_inference_mode_stays_there():
    (first, second, third), _ = layers()
    x = torch.randn(3, 50)
    with torch.inference_mode():
        first(x, None)
    outside = second(x, None)
    assert not outside.is_inference()
    outside.add_(1)
    with torch.inference_mode():
        assert third(x, None).is_inference()


def test_numbers_that_are_none_stay_so():
    (each, *_), _ = layers()
    x = torch.ones(3, 50)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    outcome = each(x, None)
    assert not outcome[:2].isfinite().any()
    assert outcome[2].isfinite().all()


def module(kept: str | None = "it can't be written") -> tuple[nn.Linear, Int8Rows]:
    (each,), (weight,) = layers(sizes=(24,))
    made = nn.Linear(50, 24).requires_grad_(False)
    made.weight = PackedWeight.of(made.weight, each, kept)
    return made, weight


def test_all_forms_of_the_call_compute_from_it():
    made, _ = module()
    x, weight, bias = torch.randn(3, 50), made.weight, made.bias
    expected = made(x)
    assert torch.equal(linear(x, weight, bias=bias), expected)
    assert torch.equal(linear(x, weight) + bias, expected)
    assert torch.equal(linear(x[0], weight, bias), expected[0])


def set_one(made: nn.Linear) -> None:
    made.weight[0] = 0.0


def set_out(made: nn.Linear) -> None:
    torch.mul(torch.zeros(24, 50), 2, out=made.weight)


def set_two_out(made: nn.Linear) -> None:
    out = (made.weight, torch.empty(0, dtype=torch.long))
    torch.max(torch.zeros(3, 24, 50), 0, out=out)


def set_other(made: nn.Linear) -> None:
    made.weight.set_(torch.zeros(24, 50))


WRITES: list[Callable[[Any], object]] = [
    *(set_one, set_out, set_two_out, set_other),
    nn.Linear.half,
    lambda made: made.to("meta"),
    lambda made: made.weight.zero_(),
    lambda made: nn.init.zeros_(made.weight),
    lambda made: torch._foreach_zero_([made.weight]),
    lambda made: nn.functional.relu(made.weight, inplace=True),
    lambda made: made.weight.data,
    lambda made: made.weight.untyped_storage().fill_(0),
]


def test_its_values_can_be_read_and_not_written():
    made, weight = module()
    assert torch.equal(made.weight.detach(), weight.values())
    assert torch.equal(made.state_dict()["weight"], weight.values())
    assert made.to("cpu").float() is made
    assert torch.zeros(24, 50).copy_(made.weight).equal(weight.values())
    with pytest.raises(ValueError, match="read-only"):
        made.weight.numpy().fill(0)
    with pytest.raises(RuntimeError, match="Creating a Parameter"):  # In torch's own words.
        nn.Parameter(made.weight)
    before = made(torch.ones(1, 50))
    for write in WRITES:
        with pytest.raises(UnsupportedError, match="it can't be written"):
            write(made)
    assert type(made.weight) is PackedWeight
    assert torch.equal(made(torch.ones(1, 50)), before)


def test_weights_that_can_be_given_back_are_given_back_by_all_that_writes():
    for write in (set_one, set_out, set_other):
        made, _ = module(None)
        write(made)
        assert type(made.weight) is nn.Parameter
        assert not made.weight[0].any()
    made, weight = module(None)
    nn.utils.parametrizations.weight_norm(made)
    torch.testing.assert_close(made.weight, weight.values())


def test_inputs_of_all_forms_are_taken_as_a_linear_layer_takes_them():
    made, weight = module()
    plain, whole = nn.Linear(50, 24), torch.randn(50, 100)
    plain.weight, plain.bias = nn.Parameter(weight.values()), made.bias
    for x in (whole.t(), whole.t()[::2], whole[:, ::2], whole[:3, 50:], torch.randn(2, 50, 3).mT):
        assert torch.equal(made(x), made(x.contiguous()))
    for shape in ((0, 50), (2, 0, 50)):
        assert made(torch.randn(shape)).shape == plain(torch.randn(shape)).shape
    for x in (torch.randn(2, 25), torch.randn(4, 100), torch.randn(()), torch.ones(2, 50).double()):
        with pytest.raises(RuntimeError) as expected:
            plain(x)
        with pytest.raises(RuntimeError) as found:
            made(x)
        assert str(found.value) == str(expected.value)


def test_gradients_and_autocast_go_through_the_rounded_weight():
    made, weight = module()
    x = torch.randn(3, 50, requires_grad=True)
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.values().sum(0).expand(3, -1))
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype is torch.bfloat16


def test_a_torch_without_products(monkeypatch):
    def cut_off(*arguments: Any) -> torch.Tensor:
        return torch.zeros(4, 64)

    def missing(*arguments: Any) -> torch.Tensor:
        raise NotImplementedError

    for product in (cut_off, missing):
        monkeypatch.setattr(rounding, "int8_vnni_product", product)
        monkeypatch.setattr(rounding, "int8_narrow_product", product)
        eight_bits.kernels.cache_clear()
        assert "this build of torch has no products" in str(eight_bits.missing_for_eight_bits())
    monkeypatch.undo()
    eight_bits.kernels.cache_clear()
