"""Weights and inputs as whole numbers of 8 bits, and their products.

Weights and inputs are rotated before they are rounded: each block of 64 columns is multiplied by
an orthogonal matrix of ones and minus ones. The product stays the same. A single large value, which
would make the steps of rounding large, is spread over its block.

An input becomes one term, a whole number for each value: from -127 to 127 where the CPU has VNNI,
else from -100 to 100. With three terms, from a coarse to a fine one, it loses hardly anything, but
products of prompts take three times as long.

All sums are of whole numbers and therefore exact. So a token gets the same bits, whether it is
alone in a forward or among others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from selfspec.compat.kernels import (
    int8_narrow_packed,
    int8_narrow_product,
    int8_narrow_unpacked,
    int8_packed,
    int8_product,
    int8_row_product,
)

_PART = 1 << 20  # A weight is rounded in parts of at most this many values.
_EXACT = 1024  # The sums of this many products of two bytes are exact in float32.
_AT_ONCE = 256  # Terms of tokens that are multiplied at once, so that they stay in the cache.
_BLOCKS = (64, 16)  # Columns that are rotated together: the first of these that divides them all.

_LARGEST = 127
# A CPU without VNNI adds up the products of two neighbouring columns in 16 bits. Inputs from 0 to
# 200 times two weights whose sum is at most 163 fit. Few rows of weights get larger steps for that.
_LARGEST_NARROW, _LARGEST_PAIR = 100, 162  # and 1 for rounding
# Inputs are rotated as whole numbers up to this. Sums of 64 of these are exact in float32.
_FINE = 1 << 17
_TERMS = 3  # where one is not enough. With two, a few random models differ by the forward's width.
# Each of these rounds a float32 that it is added to, and leaves a whole number in the lowest bits,
# with 128 added to each term, since oneDNN wants unsigned inputs. In these 23 bits, the first of
# three terms has room for half of that: up to 63, with 64 added.
_TO_BYTES = {1: float((1 << 23) + 128), _TERMS: float((1 << 23) + (64 << 16) + (128 << 8) + 128)}
_LARGEST_OF_THREE = 63


def _constant(value: float) -> torch.Tensor:
    """A number of Python would be made a tensor anew in each product, which takes longer."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


_PLACES = torch.tensor([16, 8, 0], dtype=torch.int32, device="cpu").view(_TERMS, 1, 1)  # in bits
_OTHER_HALF = torch.tensor(64 << 16, dtype=torch.int32, device="cpu")
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
    """Weights (O, I), one below the other, rotated, as whole numbers, and the scale of each row."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, *weights: torch.Tensor) -> Int8Rows:
        """The weights, rounded. They are widened in small parts, which need little memory."""
        num_rows, num_in = sum(map(len, weights)), weights[0].shape[1]
        numbers = torch.empty(num_rows, num_in, dtype=torch.int8, device="cpu")
        scale, first = torch.empty(num_rows, dtype=torch.float32, device="cpu"), 0
        for weight in weights:
            for part in torch.split(weight.detach(), max(_PART // num_in, 1)):
                here = slice(first, first + len(part))
                wide = _rotated(part.float().contiguous())
                scale[here] = wide.abs().amax(1).div_(_LARGEST).add_(_LEAST)
                if num_in > 1:
                    pairs = (wide[:, 1::2] + wide[:, :-1:2]).abs().amax(1).div_(_LARGEST_PAIR)
                    scale[here] = scale[here].maximum(pairs)
                numbers[here] = wide.div(scale[here, None]).round_()
                first += len(part)
        return cls(numbers, scale.div_(_block(num_in)))

    @classmethod
    def joined(cls, parts: Sequence[Int8Rows]) -> Int8Rows:
        """The same with several weights, one below the other."""
        numbers, scales = zip(*parts, strict=True)
        return parts[0] if len(parts) == 1 else cls(torch.cat(numbers), torch.cat(scales))

    def values(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """These rows in float32, as they were before they were rotated."""
        return _rotated(self.numbers[rows].float()).mul_(self.scale[rows][..., None])


class Products(ABC):
    """Products of some layers with one input; `spans` has each layer's first row and number."""

    _base: int  # A term counts so many times as much as the next one.

    def __init__(self, num_in: int, sizes: Sequence[int], one_term: bool) -> None:
        self.spans = list(zip(accumulate(sizes, initial=0), sizes, strict=False))
        self.num_in, self._num_out = num_in, sum(sizes)
        self._terms = 1 if one_term and _block(num_in) > 1 else _TERMS
        first = self._base ** (self._terms - 1)
        rest = first // 2 - 1 if self._terms > 1 else 0
        self._step = _constant(1 / (first * self._largest() + rest))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The outcome (T, O), in float32, for an input (T, I)."""
        if len(x) <= (at_once := _AT_ONCE // self._terms):
            return self._small_product(x)
        outcome = torch.empty(len(x), self._num_out, dtype=torch.float32, device=x.device)
        parts = torch.split(outcome, at_once), torch.split(x, at_once)
        for part, some in zip(*parts, strict=True):
            self._small_product(some, part)
        return outcome

    def _small_product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Few and simple operations: a step makes four of these for each decoder layer."""
        x = x.float().contiguous()
        fine = x.abs().amax(-1, keepdim=True).mul_(_FINE_STEP).add_(_LEAST)
        whole = _rotated((x / fine).round_())
        scale = whole.abs().amax(-1, keepdim=True).mul_(self._step).add_(_LEAST)
        return torch.mul(self._sums(whole, scale), scale.mul_(fine), out=out)

    @abstractmethod
    def unpacked(self) -> torch.Tensor:
        """The weights in float32."""

    def _added_up(self, products: torch.Tensor) -> torch.Tensor:
        """The products of all terms (terms * T, O) as one (T, O)."""
        outcome, *finer = products.chunk(self._terms)
        for product in finer:  # Not in one operation, which rounds otherwise at a buffer's end.
            outcome = outcome.mul_(self._base).add_(product)
        return outcome

    @abstractmethod
    def _largest(self) -> int:
        """The largest number of the first term."""

    @abstractmethod
    def _sums(self, whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The products of `whole / scale`, rounded, with the weights, in float32."""


class _ByteProducts(Products):
    """Products of bytes, for a CPU with VNNI."""

    _base = 256

    def __init__(self, num_in: int, sizes: Sequence[int], one_term: bool) -> None:
        super().__init__(num_in, sizes, one_term)
        self._to_bytes = _constant(_TO_BYTES[self._terms]).repeat(num_in)

    def _largest(self) -> int:
        return _LARGEST if self._terms == 1 else _LARGEST_OF_THREE

    def _sums(self, whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        numbers = torch.addcdiv(self._to_bytes, whole, scale).view(torch.int32)
        if self._terms == 1:
            return self._of_bytes(numbers.to(torch.uint8))
        terms = (numbers.add_(_OTHER_HALF) >> _PLACES).to(torch.uint8).view(-1, self.num_in)
        return self._added_up(self._of_bytes(terms))

    @abstractmethod
    def _of_bytes(self, numbers: torch.Tensor) -> torch.Tensor:
        """The float32 products of uint8 inputs, whose zero is 128, times the scales of the rows."""


class Matrix(_ByteProducts):
    """The weights of some layers, one below the other, packed."""

    def __init__(self, weights: Int8Rows, sizes: Sequence[int], one_term: bool) -> None:
        super().__init__(weights.numbers.shape[1], sizes, one_term)
        self._scale, self._packed = weights.scale, int8_packed(weights.numbers)
        self._zeros = torch.zeros_like(self._scale, dtype=torch.int64)

    def _of_bytes(self, numbers: torch.Tensor) -> torch.Tensor:
        return int8_product(numbers, self._packed, self._scale, self._zeros)

    def unpacked(self) -> torch.Tensor:
        """A product with ones gives their columns back, bit by bit."""
        columns, factors = [], torch.ones_like(self._scale)
        for first in range(0, self.num_in, _AT_ONCE):
            number = min(_AT_ONCE, self.num_in - first)
            ones = torch.full((number, self.num_in), 128, dtype=torch.uint8, device="cpu")
            ones[:, first : first + number].fill_diagonal_(129)
            columns.append(int8_product(ones, self._packed, factors, self._zeros))
        numbers = torch.cat(columns).T.contiguous()
        return _rotated(numbers).mul_(self._scale[:, None])


class _NarrowProducts(Products):
    """Products of smaller numbers, for a CPU without VNNI."""

    _base = 2 * _LARGEST_NARROW

    def _largest(self) -> int:
        return _LARGEST_NARROW

    def _sums(self, whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rest, terms = whole / scale, []
        if self._terms == 1:
            return self._of_numbers(rest)
        for place in range(self._terms - 1, 0, -1):
            terms.append((rest / self._base**place).round_())
            rest = rest.sub_(terms[-1] * self._base**place)
        return self._added_up(self._of_numbers(torch.cat([*terms, rest])))

    @abstractmethod
    def _of_numbers(self, x: torch.Tensor) -> torch.Tensor:
        """The products of rounded float32 inputs, times the scales of the rows."""


class NarrowMatrix(_NarrowProducts):
    """The weights of some layers, one below the other, packed."""

    def __init__(self, weights: Int8Rows, sizes: Sequence[int], one_term: bool) -> None:
        super().__init__(weights.numbers.shape[1], sizes, one_term)
        self._scale, self._packed = weights.scale, int8_narrow_packed(*weights)

    def _of_numbers(self, x: torch.Tensor) -> torch.Tensor:
        return int8_narrow_product(x, self._packed, _LARGEST_NARROW)

    def unpacked(self) -> torch.Tensor:
        return Int8Rows(int8_narrow_unpacked(self._packed), self._scale).values()


class _InFile(Products):
    """The weights of one layer that is streamed: as its file holds them, while it computes.

    In between they are blank: their scales are NaN.
    """

    def __init__(self, blank: Int8Rows, one_term: bool) -> None:
        super().__init__(blank.numbers.shape[1], [len(blank.scale)], one_term)
        self.numbers, self.scale = blank

    def unpacked(self) -> torch.Tensor:
        return Int8Rows(self.numbers, self.scale).values()


class FileMatrix(_InFile, _ByteProducts):
    """Weights in a file, for a CPU with VNNI."""

    def _of_bytes(self, numbers: torch.Tensor) -> torch.Tensor:
        signed = numbers.bitwise_xor(128).view(torch.int8)
        return int8_row_product(signed, self.numbers).float().mul_(self.scale)


class NarrowFileMatrix(_InFile, _NarrowProducts):
    """Weights in a file, for a CPU without VNNI, where torch's own product of bytes is slow."""

    def _of_numbers(self, x: torch.Tensor) -> torch.Tensor:
        """In float32, in which sums over so many columns are exact. Rounds as FBGEMM does."""
        x, parts = x.add(_LARGEST_NARROW).round_().sub_(_LARGEST_NARROW), []
        columns = [slice(first, first + _EXACT) for first in range(0, self.num_in, _EXACT)]
        for rows in torch.split(self.numbers, max(_PART // self.num_in, 1)):
            wide = rows.float()
            blocks = [torch.mm(x[:, some], wide[:, some].t()).double() for some in columns]
            parts.append(torch.stack(blocks).sum(0))
        return torch.cat(parts, 1).float().mul_(self.scale)
