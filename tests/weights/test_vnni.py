"""Products of whole numbers: a token gets the same bits whatever is beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.weights import vnni
from selfspec.weights.vnni import VnniMatrix, VnniRows, has_vnni

pytestmark = pytest.mark.skipif(not has_vnni(), reason="this CPU has no such products")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_in", [48, 64, 576])
def test_it_is_nearly_the_product_with_the_weight(num_in, dtype):
    torch.manual_seed(0)
    weight, bias = torch.randn(24, num_in), torch.randn(24).to(dtype)
    made = VnniMatrix.of(weight)
    assert (made.unpacked() - weight).abs().max() < 0.1
    x = torch.randn(2, 5, num_in) * torch.tensor([1e-3, 1.0, 1.0, 1e3, 0.0])[:, None]
    straight = linear(x.double(), made.unpacked().double())
    outcome = made(x.to(dtype), bias)
    assert (outcome.shape, outcome.dtype) == (straight.shape, dtype)
    off = (outcome.double() - bias - straight).abs().amax(-1)
    assert (off <= 0.02 * (1 + straight.abs().amax(-1))).all()


@pytest.mark.parametrize("num_in", [64, 576])
def test_large_values_are_spread_before_they_are_rounded(num_in):
    """Of weights too. Without a rotation, one large column takes the steps of all others."""
    weight, x = torch.randn(24, num_in), torch.randn(5, num_in)
    weight[:, 7], x[:, 3] = 100, 100
    made = VnniMatrix.of(weight)
    assert (made.unpacked() - weight).square().mean().sqrt() < 0.1
    torch.testing.assert_close(made(x, None), x @ made.unpacked().T, rtol=0.01, atol=10)


def test_an_embedding_reads_rows_of_the_weight_that_its_head_has():
    made, ids = VnniRows.of(torch.randn(40, 48)), torch.tensor([[3, 0], [39, 3]])
    assert torch.equal(made.rows(ids), made.unpacked()[ids])
    assert made.num_bytes == 2 * 40 * 48 + 4 * 40


def test_no_sum_is_cut_off():
    """All numbers here are as large as they get, and their sums have one sign."""
    large = torch.ones(2, 64)
    large[1] = 100 * nn.functional.one_hot(torch.tensor(7), 64)
    made = VnniMatrix.of(large)
    expected = large @ made.unpacked().T
    torch.testing.assert_close(made(large, None), expected, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("num_in", [16, 48, 576])
def test_a_token_gets_the_same_bits_alone_and_among_others(num_in):
    torch.manual_seed(0)
    made, x = VnniMatrix.of(torch.randn(40, num_in)), torch.randn(300, num_in)
    whole = made(x, None)
    for number in (1, 2, 3, 8, 31, 64, 65, 128):
        assert torch.equal(made(x[:number].clone(), None), whole[:number])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_of_no_importance(dtype):
    made, x, before = VnniMatrix.of(torch.randn(24, 64)), torch.randn(3, 64), torch.float32
    expected, values = made(x, None), made.unpacked()
    torch.set_default_dtype(dtype)
    vnni._rotation.cache_clear()
    has_vnni.cache_clear()
    try:
        assert has_vnni()
        assert torch.equal(made(x, None), expected)
        assert torch.equal(made.unpacked(), values)
    finally:
        torch.set_default_dtype(before)
        vnni._rotation.cache_clear()


def test_numbers_that_are_none_stay_so():
    x = torch.ones(3, 48)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    outcome = VnniMatrix.of(torch.randn(32, 48))(x, None)
    assert not outcome[:2].isfinite().any()
    assert outcome[2].isfinite().all()


def test_a_torch_without_products(monkeypatch):
    def cut_off(*arguments: Any) -> torch.Tensor:
        return torch.zeros(4, 64)

    def missing(*arguments: Any) -> torch.Tensor:
        raise NotImplementedError

    for product in (cut_off, missing):
        monkeypatch.setattr(vnni, "int8_vnni_product", product)
        has_vnni.cache_clear()
        assert not has_vnni()
    monkeypatch.undo()
    has_vnni.cache_clear()
