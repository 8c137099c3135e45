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
    int8_unpacked,
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
# Of a tensor whose size this divides, torch computes all activations by the same instructions.
_EVEN = 32
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


def _split(whole: torch.Tensor, scale: torch.Tensor, terms: int, base: int) -> torch.Tensor:
    """`whole / scale` as terms (terms * T, I), each of which counts `base` times the next one.

    The last one is not rounded yet.
    """
    rest, numbers = whole / scale, []
    for place in range(terms - 1, 0, -1):
        numbers.append((rest / base**place).round_())
        rest = rest.sub_(numbers[-1] * base**place)
    return torch.cat([*numbers, rest]) if numbers else rest


class Kernel(NamedTuple):
    """How a processor multiplies whole numbers of 8 bits."""

    largest: int  # The largest whole number of an input.
    prepare: Callable[[torch.Tensor], torch.Tensor]  # an input, for `multiply`
    pack: Callable[[Int8Rows], Any]
    multiply: Callable[[torch.Tensor, Any], torch.Tensor]
    unpack: Callable[[Any], Int8Rows]


class _RoundedInput(NamedTuple):
    """What an input (T, I) was rounded to: whole numbers and the scales of a few rows at a time."""

    rounding: tuple[int, int]  # the largest whole number, and how many terms there are
    x: torch.Tensor  # A copy: an input that was written by any means is another one.
    parts: list[tuple[torch.Tensor, torch.Tensor]]

    def is_of(self, rounding: tuple[int, int], x: torch.Tensor) -> bool:
        is_alike = self.rounding == rounding and self.x.dtype is x.dtype
        return is_alike and torch.equal(self.x, x)


class _ThisThread(threading.local):
    last: _RoundedInput | None = None


_this_thread = _ThisThread()


class Int8Matrix:
    """The rounded weight (O, I) of a layer, which multiplies inputs."""

    def __init__(self, kernel: Kernel, weight: Int8Rows, one_term: bool) -> None:
        self._num_out, num_in = weight.numbers.shape
        self._kernel, self._weight = kernel, kernel.pack(weight)
        self._terms = 1 if one_term and num_in % _EVEN == 0 else _TERMS
        self._base = 2 * kernel.largest
        first = self._base ** (self._terms - 1)
        rest = max(first // 2 - 1, 0)
        self._step = _constant(1 / (first * kernel.largest + rest))

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
        rounding, last = (self._kernel.largest, self._terms), _this_thread.last
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
        numbers = _split(whole, scale, self._terms, self._base)
        return self._kernel.prepare(numbers), scale.mul_(fine)

    def _multiplied(
        self, numbers: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        sums = self._kernel.multiply(numbers, self._weight)
        if self._terms > 1:
            sums, *finer = sums.chunk(self._terms)
            for product in finer:  # Not in one operation, which rounds otherwise at a buffer's end.
                sums = sums.mul_(self._base).add_(product)
        return torch.mul(sums, scale, out=out)


def _as_it_is(value: Any) -> Any:
    return value


# -- with VNNI: bytes ------------------------------------------------------------------------------


class _PackedBytes(NamedTuple):
    packed: Any
    scale: torch.Tensor
    zeros: torch.Tensor


def _to_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.add_(_TO_BYTE).view(torch.int32).to(torch.uint8)


def _pack_bytes(weights: Int8Rows) -> _PackedBytes:
    zeros = torch.zeros_like(weights.scale, dtype=torch.int64)
    return _PackedBytes(int8_packed(weights.numbers), weights.scale, zeros)


def _multiply_bytes(numbers: torch.Tensor, weights: _PackedBytes) -> torch.Tensor:
    return int8_product(numbers, *weights)


def _unpack_bytes(weights: _PackedBytes) -> Int8Rows:
    return Int8Rows(int8_unpacked(weights.packed), weights.scale)


def _multiply_rows(numbers: torch.Tensor, weights: Int8Rows) -> torch.Tensor:
    signed = numbers.bitwise_xor(128).view(torch.int8)
    return int8_row_product(signed, weights.numbers).float().mul_(weights.scale)


# -- without VNNI: smaller numbers -----------------------------------------------------------------


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


class Kernels(NamedTuple):
    """For packed weights, and for those of one layer as a file holds them."""

    packed: Kernel
    in_file: Kernel


BYTES = Kernels(
    Kernel(_LARGEST, _to_bytes, _pack_bytes, _multiply_bytes, _unpack_bytes),
    Kernel(_LARGEST, _to_bytes, _as_it_is, _multiply_rows, _as_it_is),
)
NARROW = Kernels(
    Kernel(_LARGEST_NARROW, _as_it_is, _pack_narrowly, _multiply_narrowly, _unpack_narrowly),
    Kernel(_LARGEST_NARROW, _as_it_is, _as_it_is, _multiply_rows_in_float, _as_it_is),
)
