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

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

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
_BASE_NARROW = 2 * _LARGEST_NARROW
# Inputs are rotated as whole numbers up to this. Sums of 64 of these are exact in float32.
_FINE = 1 << 17
# Of a tensor whose size this divides, torch computes all activations by the same instructions.
_EVEN = 32
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
    def of(cls, weight: torch.Tensor) -> Int8Rows:
        """A weight, rounded. It is widened in small parts, which need little memory."""
        num_rows, num_in = weight.shape
        numbers = torch.empty(num_rows, num_in, dtype=torch.int8, device="cpu")
        scales = torch.empty(num_rows, dtype=torch.float32, device="cpu")
        at_once = max(_PART // num_in, 1)
        parts = (torch.split(tensor, at_once) for tensor in (weight.detach(), numbers, scales))
        for part, whole, scale in zip(*parts, strict=True):
            wide = _rotated(part.float().contiguous())
            scale.copy_(wide.abs().amax(1).div_(_LARGEST).add_(_LEAST))
            if num_in > 1:
                pairs = (wide[:, 1::2] + wide[:, :-1:2]).abs().amax(1).div_(_LARGEST_PAIR)
                torch.maximum(scale, pairs, out=scale)
            whole.copy_(wide.div(scale[:, None]).round_())
        return cls(numbers, scales.div_(_block(num_in)))

    def values(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """These rows in float32, as they were before they were rotated."""
        return _rotated(self.numbers[rows].float()).mul_(self.scale[rows][..., None])


class Kernel(NamedTuple):
    """How a processor multiplies whole numbers of 8 bits."""

    base: int  # A term counts this many times as much as the next one.
    largest: tuple[int, int]  # The largest number of an only term, and of the first of three.
    split: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    pack: Callable[[Int8Rows], Any]
    multiply: Callable[[torch.Tensor, Any], torch.Tensor]
    unpack: Callable[[Any], Int8Rows]


class _RoundedInput(NamedTuple):
    """What an input (T, I) was rounded to: whole numbers and the scales of a few rows at a time."""

    rounding: tuple[object, int]  # how it was split, and into how many terms
    x: torch.Tensor  # A copy: an input that was written by any means is another one.
    parts: list[tuple[torch.Tensor, torch.Tensor]]

    def is_of(self, rounding: tuple[object, int], x: torch.Tensor) -> bool:
        is_alike = self.rounding == rounding and self.x.dtype is x.dtype
        return is_alike and torch.equal(self.x, x)


class _ThisThread(threading.local):
    last: _RoundedInput | None = None


_this_thread = _ThisThread()


class Int8Matrix:
    """The rounded weight (O, I) of a layer, which multiplies inputs.

    `split` makes whole numbers (terms * T, I) of `whole / scale`, and `multiply` their products
    with the packed weight, times the scales of its rows, in float32.
    """

    def __init__(self, kernel: Kernel, weight: Int8Rows, one_term: bool) -> None:
        self._num_out, num_in = weight.numbers.shape
        self._kernel, self._weight = kernel, kernel.pack(weight)
        self._terms = 1 if one_term and num_in % _EVEN == 0 else _TERMS
        first = kernel.base ** (self._terms - 1)
        rest = max(first // 2 - 1, 0)
        self._step = _constant(1 / (first * kernel.largest[self._terms > 1] + rest))

    def put(self, **parts: torch.Tensor) -> None:
        """Replaces `numbers` or `scale` of a weight that is read from a file."""
        self._weight = self._weight._replace(**parts)

    def unpacked(self) -> torch.Tensor:
        """The weight in float32."""
        return self._kernel.unpack(self._weight).values()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        outcome = self._product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        if bias is not None:
            outcome.add_(bias)
        return outcome.to(x.dtype)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """The outcome (T, O), in float32, for an input (T, I)."""
        parts = self._rounded(x)
        if len(parts) == 1:
            return self._multiplied(*parts[0])
        outcome = torch.empty(len(x), self._num_out, dtype=torch.float32, device=x.device)
        outs = torch.split(outcome, len(parts[0][1]))
        for (numbers, scale), out in zip(parts, outs, strict=True):
            self._multiplied(numbers, scale, out)
        return outcome

    def _rounded(self, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Layers that get the same input one after the other, as in attention, share it rounded."""
        rounding, last = (self._kernel.split, self._terms), _this_thread.last
        if last is None or not last.is_of(rounding, x):
            parts = [self._round(part) for part in torch.split(x, _AT_ONCE // self._terms)]
            last = _this_thread.last = _RoundedInput(rounding, x.clone(), parts)
        return last.parts

    def _round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Few and simple operations: a step makes four of these for each decoder layer."""
        x = x.float().contiguous()
        fine = x.abs().amax(-1, keepdim=True).mul_(_FINE_STEP).add_(_LEAST)
        whole = _rotated((x / fine).round_())
        scale = whole.abs().amax(-1, keepdim=True).mul_(self._step).add_(_LEAST)
        return self._kernel.split(whole, scale, self._terms), scale.mul_(fine)

    def _multiplied(
        self, numbers: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        sums = self._kernel.multiply(numbers, self._weight)
        if self._terms > 1:
            sums, *finer = sums.chunk(self._terms)
            for product in finer:  # Not in one operation, which rounds otherwise at a buffer's end.
                sums = sums.mul_(self._kernel.base).add_(product)
        return torch.mul(sums, scale, out=out)


# -- with VNNI: bytes ------------------------------------------------------------------------------


class _PackedBytes(NamedTuple):
    packed: Any
    scale: torch.Tensor
    zeros: torch.Tensor
    num_in: int


@cache
def _to_bytes(terms: int, num_in: int) -> torch.Tensor:
    return _constant(_TO_BYTES[terms]).repeat(num_in)


def _split_into_bytes(whole: torch.Tensor, scale: torch.Tensor, terms: int) -> torch.Tensor:
    """As uint8 whose zero is 128."""
    num_in = whole.shape[-1]
    numbers = torch.addcdiv(_to_bytes(terms, num_in), whole, scale).view(torch.int32)
    if terms == 1:
        return numbers.to(torch.uint8)
    return (numbers.add_(_OTHER_HALF) >> _PLACES).to(torch.uint8).view(-1, num_in)


def _pack_bytes(weights: Int8Rows) -> _PackedBytes:
    zeros = torch.zeros_like(weights.scale, dtype=torch.int64)
    packed = int8_packed(weights.numbers)
    return _PackedBytes(packed, weights.scale, zeros, weights.numbers.shape[1])


def _multiply_bytes(numbers: torch.Tensor, weights: _PackedBytes) -> torch.Tensor:
    return int8_product(numbers, *weights[:3])


def _unpack_bytes(weights: _PackedBytes) -> Int8Rows:
    """A product with ones gives their columns back, bit by bit."""
    packed, scale, zeros, num_in = weights
    columns, factors = [], torch.ones_like(scale)
    for first in range(0, num_in, _AT_ONCE):
        number = min(_AT_ONCE, num_in - first)
        ones = torch.full((number, num_in), 128, dtype=torch.uint8, device="cpu")
        ones[:, first : first + number].fill_diagonal_(129)
        columns.append(int8_product(ones, packed, factors, zeros))
    return Int8Rows(torch.cat(columns).T.contiguous(), scale)


def _multiply_rows(numbers: torch.Tensor, weights: Int8Rows) -> torch.Tensor:
    signed = numbers.bitwise_xor(128).view(torch.int8)
    return int8_row_product(signed, weights.numbers).float().mul_(weights.scale)


# -- without VNNI: smaller numbers -----------------------------------------------------------------


def _split_narrowly(whole: torch.Tensor, scale: torch.Tensor, terms: int) -> torch.Tensor:
    """As float32; the last term is not rounded yet."""
    rest, numbers = whole / scale, []
    for place in range(terms - 1, 0, -1):
        numbers.append((rest / _BASE_NARROW**place).round_())
        rest = rest.sub_(numbers[-1] * _BASE_NARROW**place)
    return torch.cat([*numbers, rest]) if numbers else rest


def _pack_narrowly(weights: Int8Rows) -> tuple[object, torch.Tensor]:
    return int8_narrow_packed(*weights), weights.scale


def _multiply_narrowly(x: torch.Tensor, weights: tuple[object, torch.Tensor]) -> torch.Tensor:
    return int8_narrow_product(x, weights[0], _LARGEST_NARROW)


def _unpack_narrowly(weights: tuple[object, torch.Tensor]) -> Int8Rows:
    return Int8Rows(int8_narrow_unpacked(weights[0]), weights[1])


def _multiply_rows_in_float(x: torch.Tensor, weights: Int8Rows) -> torch.Tensor:
    """In float32, in which sums over so many columns are exact. Rounds as FBGEMM does.

    Torch's own product of bytes is slow without VNNI.
    """
    x, parts = x.add(_LARGEST_NARROW).round_().sub_(_LARGEST_NARROW), []
    num_in = x.shape[-1]
    columns = [slice(first, first + _EXACT) for first in range(0, num_in, _EXACT)]
    for rows in torch.split(weights.numbers, max(_PART // num_in, 1)):
        wide = rows.float()
        blocks = [torch.mm(x[:, some], wide[:, some].t()).double() for some in columns]
        parts.append(torch.stack(blocks).sum(0))
    return torch.cat(parts, 1).float().mul_(weights.scale)


def _as_they_are(weights: Int8Rows) -> Int8Rows:
    return weights


def _in_file(kernel: Kernel, multiply: Callable[[torch.Tensor, Int8Rows], torch.Tensor]) -> Kernel:
    """The kernel for weights as a file holds them, whose inputs are rounded in the same way."""
    return kernel._replace(pack=_as_they_are, multiply=multiply, unpack=_as_they_are)


class Kernels(NamedTuple):
    """For packed weights, and for those of one layer as a file holds them."""

    packed: Kernel
    in_file: Kernel


_bytes = Kernel(
    256,
    (_LARGEST, _LARGEST_OF_THREE),
    _split_into_bytes,
    _pack_bytes,
    _multiply_bytes,
    _unpack_bytes,
)
BYTES = Kernels(_bytes, _in_file(_bytes, _multiply_rows))
_narrow = Kernel(
    _BASE_NARROW,
    (_LARGEST_NARROW, _LARGEST_NARROW),
    _split_narrowly,
    _pack_narrowly,
    _multiply_narrowly,
    _unpack_narrowly,
)
NARROW = Kernels(_narrow, _in_file(_narrow, _multiply_rows_in_float))
