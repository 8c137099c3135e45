"""Weights and inputs as whole numbers of 8 bits, and their products.

Weights and inputs are rotated before they are rounded: each block of 64 columns is multiplied by
an orthogonal matrix of ones and minus ones. The product stays the same. A single large value, which
would make the steps of rounding large, is spread over its block.

An input becomes one term, a whole number from -127 to 127 for each value. With three terms, from a
coarse to a fine one, it loses hardly anything, but products of prompts take three times as long.

All sums are of whole numbers and therefore exact. So a token gets the same bits, whether it is
alone in a forward or among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from selfspec.compat.kernels import (
    int8_packed,
    int8_unpacked,
    int8_vnni_product,
)

_PART = 1 << 20  # A weight is rounded in parts of at most this many values.
_AT_ONCE = 256  # Terms of tokens that are multiplied at once, so that they stay in the cache.
_BLOCKS = (64, 16)  # Columns that are rotated together: the first of these that divides them all.

_LARGEST = 127
_BASE = 2 * _LARGEST  # A term counts so many times the next finer one.
# Inputs are rotated as whole numbers up to this. Sums of 64 of these are exact in float32.
_FINE = 1 << 17
_TERMS = 3  # where one is not enough. With two, a few random models differ by the forward's width.


def _constant(value: float) -> torch.Tensor:
    """A number of Python would be made a tensor anew in each product, which takes longer."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


# Added to a float32, this rounds it and leaves it in the lowest bits, as a byte whose zero is 128.
_TO_BYTE = _constant((1 << 23) + 128)
_FINE_STEP = _constant(1 / _FINE)
_LEAST = _constant(1e-30)  # The scale of what is all zeros.


@cache
def _block(num_in: int) -> int:
    """How many columns are rotated together; 1 if none are."""
    return next((block for block in _BLOCKS if num_in % block == 0), 1)


@cache
def _rotation(block: int) -> torch.Tensor:
    """A symmetric matrix of ones and minus ones, orthogonal but for the factor `block`.

    In a matrix of Sylvester's kind, the first column is all ones and would gather the mean of an
    input. Here the sums of all columns are equal.
    """
    four = 1 - 2 * torch.eye(4, dtype=torch.float32, device="cpu").flip(0)
    return four if block == 4 else torch.kron(_rotation(block // 4), four)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """A contiguous float32 (..., I), with each block of columns times its rotation."""
    if (block := _block(x.shape[-1])) == 1:
        return x
    return torch.mm(x.view(-1, block), _rotation(block)).view(x.shape)


class Int8Rows(NamedTuple):
    """A weight (O, I), rotated, as whole numbers, and the scales of its rows."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Rows:
        """A weight, rounded. It is widened in small parts, which need little memory."""
        num_in = weight.shape[1]
        numbers = torch.empty(weight.shape, dtype=torch.int8, device="cpu")
        scales = torch.empty(len(weight), dtype=torch.float32, device="cpu")
        at_once = max(_PART // num_in, 1)
        for first in range(0, len(weight), at_once):
            rows = slice(first, first + at_once)
            wide = _rotated(weight[rows].detach().float().contiguous())
            scale = wide.abs().amax(1).div_(_LARGEST).add_(_LEAST)
            numbers[rows], scales[rows] = wide.div(scale[:, None]).round_(), scale
        return cls(numbers, scales.div_(_block(num_in)))

    @classmethod
    def joined(cls, parts: Sequence[Int8Rows]) -> Int8Rows:
        """Several weights, one below the other."""
        if len(parts) == 1:
            return parts[0]
        numbers = torch.cat([part.numbers for part in parts])
        return cls(numbers, torch.cat([part.scale for part in parts]))

    def values(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """These rows in float32, as they were before they were rotated."""
        return _rotated(self.numbers[rows].float()).mul_(self.scale[rows][..., None])


def _split(whole: torch.Tensor, scale: torch.Tensor, terms: int) -> torch.Tensor:
    """`whole / scale` as terms (terms * T, I), of which one counts `_BASE` times the next one.

    The last one is not rounded yet.
    """
    rest, numbers = whole / scale, []
    for power in range(terms - 1, 0, -1):
        numbers.append((rest / _BASE**power).round_())
        rest = rest.sub_(numbers[-1] * _BASE**power)
    return torch.cat([*numbers, rest]) if numbers else rest


class Products:
    """Products of some layers with one input; `spans` has their first rows and numbers."""

    def __init__(self, weights: Int8Rows, sizes: Sequence[int], *, one_term: bool) -> None:
        self.spans = list(zip(accumulate(sizes, initial=0), sizes, strict=False))
        self._packed, self._scale = int8_packed(weights.numbers), weights.scale
        self._zeros = torch.zeros_like(weights.scale, dtype=torch.int64)
        self._num_out = sum(sizes)
        self._terms = 1 if one_term and _block(weights.numbers.shape[1]) > 1 else _TERMS
        first = _BASE ** (self._terms - 1)
        self._step = _constant(1 / (first * _LARGEST + max(first // 2 - 1, 0)))

    def unpacked(self) -> torch.Tensor:
        """The weights in float32."""
        return Int8Rows(int8_unpacked(self._packed), self._scale).values()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The product (T, O), in float32, with an input (T, I)."""
        if len(x) <= (at_once := _AT_ONCE // self._terms):
            return self._small_product(x)
        product = torch.empty(len(x), self._num_out, dtype=torch.float32, device=x.device)
        for first in range(0, len(x), at_once):
            tokens = slice(first, first + at_once)
            self._small_product(x[tokens], product[tokens])
        return product

    def _small_product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Few and simple operations: a step makes four of these for a decoder layer."""
        x = x.float().contiguous()
        fine = x.abs().amax(-1, keepdim=True).mul_(_FINE_STEP).add_(_LEAST)
        whole = _rotated((x / fine).round_())
        scale = whole.abs().amax(-1, keepdim=True).mul_(self._step).add_(_LEAST)
        terms = _split(whole, scale, self._terms).add_(_TO_BYTE).view(torch.int32).to(torch.uint8)
        sums = int8_vnni_product(terms, self._packed, self._scale, self._zeros)
        if self._terms > 1:
            sums, *finer = sums.chunk(self._terms)
            for product in finer:  # Not in one operation, which rounds otherwise at a buffer's end.
                sums = sums.mul_(_BASE).add_(product)
        return torch.mul(sums, scale.mul_(fine), out=out)
