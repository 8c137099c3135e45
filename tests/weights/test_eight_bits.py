"""Weights in 8 bits: a token gets the same bits whatever is beside it; nothing is lost unseen."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.weights import eight_bits, rounding
from selfspec.weights.eight_bits import EightBits
from selfspec.weights.rounding import Int8Rows, Products

SIZES = (24, 16, 40)  # The rows of three layers that get the same input.


def layers(
    num_in: int = 50, sizes: tuple[int, ...] = SIZES, terms: int = 3
) -> tuple[list[Any], list[Int8Rows]]:
    torch.manual_seed(0)
    weights = [Int8Rows.of(torch.randn(size, num_in)) for size in sizes]
    matrix = Products(Int8Rows.joined(weights), sizes, one_term=terms == 1)
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
    outcome = Products(Int8Rows.of(weight), [24], one_term=True).product(x)
    straight = x @ Int8Rows.of(weight).values().T
    torch.testing.assert_close(outcome, straight, rtol=0.01, atol=10)


@pytest.mark.parametrize("terms", [1, 3])
def test_no_sum_is_cut_off(terms):
    """All numbers here are as large as they get, and their sums have one sign."""
    large = torch.ones(2, 64)
    large[1] = 100 * nn.functional.one_hot(torch.tensor(7), 64)
    rounded = Int8Rows.of(large)
    found = Products(rounded, [2], one_term=terms == 1).product(large)
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
    matrices = [Products(weight, [len(weight.scale)], one_term=False) for weight in weights]
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
    eight_bits.has_products.cache_clear()
    try:
        assert eight_bits.has_products()
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


def test_a_torch_without_products(monkeypatch):
    def cut_off(*arguments: Any) -> torch.Tensor:
        return torch.zeros(4, 64)

    def missing(*arguments: Any) -> torch.Tensor:
        raise NotImplementedError

    for product in (cut_off, missing):
        monkeypatch.setattr(rounding, "int8_vnni_product", product)
        eight_bits.has_products.cache_clear()
        assert not eight_bits.has_products()
    monkeypatch.undo()
    eight_bits.has_products.cache_clear()
