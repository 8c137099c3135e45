"""Weights that are rounded to 8 or 4 bits, and the products that layers compute from them.

In 8 bits, each row of a weight has one scale. In 4 bits, each 32 neighbouring weights of a row have
a scale and a zero point. Torch multiplies both with inputs in bfloat16, and a token gets the same
bits whether it is alone in a forward or among others. So a tree gets what a plain step gets.

These products are made for few tokens. For a prompt, a weight is widened to bfloat16, block by
block, and multiplied as any other. `weights/vnni` has faster products in 8 bits, for some CPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from time import perf_counter

import torch
from torch.nn.functional import linear

from selfspec.compat.kernels import (
    int4_order,
    int4_packed,
    int4_product,
    int4_unpacked,
    int8_product,
)

BITS = {"int8": 8, "int4": 4}
GROUP = 32  # So many columns share a scale in 4 bits.
LARGEST = 127  # of the whole numbers in 8 bits
LEAST = 1e-30  # The least scale, for what is all zeros.
_COLUMNS, _ROWS = 16, 64  # Torch computes wrongly, or crashes, if these don't divide a weight's.
_BLOCK = 1 << 20  # This many weights are widened at once; in bfloat16 they stay in the cache.


class _ThisThread(threading.local):
    is_step = False  # Does a forward over drafts run?


_this_thread = _ThisThread()


@contextmanager
def products_of_a_step() -> Iterator[None]:
    """Inside, in this thread, layers multiply as in a plain step, however many tokens there are."""
    before, _this_thread.is_step = _this_thread.is_step, True
    try:
        yield
    finally:
        _this_thread.is_step = before


class RoundedMatrix:
    """A weight (O, I) as whole numbers and their scales. Its layer computes in any dtype."""

    bits: int
    few_tokens: int  # For more of a prompt's tokens than this, it is faster to widen the weight.

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        narrow = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        is_step = _this_thread.is_step or (x.dim() > 2 and x.shape[-2] == 1)
        is_narrow = is_step or len(narrow) <= self.few_tokens
        product = self._product(narrow) if is_narrow else self._wide_product(narrow)
        output = product.to(x.dtype).view(*x.shape[:-1], -1)
        return output if bias is None else output.add_(bias)

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, weight: torch.Tensor) -> RoundedMatrix:
        """A weight, rounded, some rows at a time."""
        raise NotImplementedError

    def unpacked(self) -> torch.Tensor:
        """The weight (O, I) in float32."""
        raise NotImplementedError

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """The output (T, O) for a contiguous input (T, I), both in bfloat16."""
        raise NotImplementedError

    def _wide_product(self, x: torch.Tensor) -> torch.Tensor:
        """The same for many tokens, whose bits depend on how many they are."""
        raise NotImplementedError


class Int8Matrix(RoundedMatrix):
    """Whole numbers (O, I) from -127 to 127, and a scale for each row."""

    bits, few_tokens = 8, 16

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Matrix:
        numbers = torch.empty(weight.shape, dtype=torch.int8, device="cpu")
        scales = torch.empty(len(weight), dtype=torch.bfloat16, device="cpu")
        for rows in blocks_of(weight.shape):
            wide = weight[rows].detach().float()
            scales[rows] = wide.abs().amax(1).div_(LARGEST).add_(LEAST)
            numbers[rows] = (wide / scales[rows, None]).round_().clamp_(-LARGEST, LARGEST)
        return cls(numbers, scales)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """These rows, as an embedding reads them, in float32."""
        return self.numbers[ids].float().mul_(self.scales[ids][..., None])

    def unpacked(self) -> torch.Tensor:
        return self.numbers.float().mul_(self.scales[:, None])

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return int8_product(x, self.numbers, self.scales)

    def _wide_product(self, x: torch.Tensor) -> torch.Tensor:
        blocks = blocks_of(self.numbers.shape)
        parts = [linear(x, self.numbers[rows].to(x.dtype)) for rows in blocks]
        return torch.cat(parts, -1).mul_(self.scales)


class Int4Matrix(RoundedMatrix):
    """Numbers from 0 to 15, in the order that this processor reads; scales (I / 32, O, 2).

    A weight is `(number - 8) * scale + zero`.
    """

    bits, few_tokens = 4, 64

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int4Matrix:
        num_out, num_in = weight.shape
        numbers = torch.empty(num_out, num_in // 2, dtype=torch.uint8, device="cpu")
        scales = torch.empty(num_in // GROUP, num_out, 2, dtype=torch.bfloat16, device="cpu")
        for rows in blocks_of(weight.shape):
            groups = weight[rows].detach().float().view(-1, num_in // GROUP, GROUP)
            scale_and_zero = _best_grid(groups)
            scale, zero = scale_and_zero.float()[..., None].unbind(-2)
            whole = _on_grid(groups, scale, zero).to(torch.int32).view(-1, num_in)
            numbers[rows] = int4_packed(whole)
            scales[:, rows] = scale_and_zero.transpose(0, 1)
        return cls(numbers, scales)

    def unpacked(self) -> torch.Tensor:
        numbers = self._in_order(int4_unpacked(self.numbers)).transpose(1, 2)
        scale, zero = self.scales.float().transpose(0, 1)[..., None].unbind(-2)
        groups = numbers.reshape(-1, len(self.scales), GROUP).float()
        return groups.mul_(scale).add_(zero).flatten(1)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return int4_product(x, self.numbers, GROUP, self.scales)

    def _wide_product(self, x: torch.Tensor) -> torch.Tensor:
        """Zero points are multiplied with sums of inputs: no weight is touched for them."""
        blocks = blocks_of((len(self.numbers), x.shape[1]))
        stored = torch.cat([x @ self._scaled(rows) for rows in blocks], -1)
        product = self._in_order(stored.view(len(x), -1, len(int4_order()))).flatten(1)
        return product.add_(x.view(len(x), -1, GROUP).sum(-1) @ self.scales[..., 1])

    def _scaled(self, rows: slice) -> torch.Tensor:
        """`(number - 8) * scale` of these rows, as (I, rows in the order in which they are stored).

        To bring them into the order of a weight would take longer than the product.
        """
        numbers = int4_unpacked(self.numbers[rows])
        num_blocks, num_in, size = numbers.shape
        scale = self.scales[:, rows, 0].view(-1, num_blocks, size)[..., int4_order()]
        scaled = torch.empty(num_in, num_blocks * size, dtype=torch.bfloat16, device="cpu")
        torch.mul(
            numbers.view(num_blocks, -1, GROUP, size),
            scale.transpose(0, 1)[:, :, None],
            out=scaled.view(-1, GROUP, num_blocks, size).permute(2, 0, 1, 3),
        )
        return scaled

    def _in_order(self, stored: torch.Tensor) -> torch.Tensor:
        """Values of blocks (…, blocks, rows), put into the order of the rows."""
        return stored[..., int4_order().argsort()]


def bits_for(shape: tuple[int, ...], bits: int) -> int | None:
    """The bits that a linear layer's weight can have: 8 where 4 can't be; None if neither."""
    num_out, num_in = shape
    if num_in % _COLUMNS:
        return None
    return 4 if bits == 4 and num_in % GROUP == num_out % _ROWS == 0 else 8


def round_weight(weight: torch.Tensor, bits: int) -> RoundedMatrix | None:
    """A linear layer's weight in 4 or 8 bits; in 8 if its shape allows no 4, None if neither."""
    possible = bits_for(tuple(weight.shape), bits)
    if possible is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        return (Int4Matrix if possible == 4 else Int8Matrix).of(weight)


def stored_forms(shape: tuple[int, ...], bits: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The dtypes and shapes of a rounded weight's numbers and scales."""
    num_out, num_in = shape
    if bits == 8:
        return [(torch.int8, shape), (torch.bfloat16, (num_out,))]
    scales = (num_in // GROUP, num_out, 2)
    return [(torch.uint8, (num_out, num_in // 2)), (torch.bfloat16, scales)]


def matrix_of(numbers: torch.Tensor, scales: torch.Tensor) -> RoundedMatrix:
    """A weight that is rounded already."""
    return (Int8Matrix if numbers.dtype is torch.int8 else Int4Matrix)(numbers, scales)


def rounded_matrix(weight: torch.Tensor) -> RoundedMatrix | None:
    """The matrix that holds a rounded weight; None for any other weight."""
    matrix = getattr(weight, "packed", None)
    return matrix if isinstance(matrix, RoundedMatrix) else None


@cache
def rounding_reason(bits: int) -> str | None:
    """Why this machine can't compute from weights of so many bits; None if it can."""
    ones = torch.ones(_ROWS, _ROWS, dtype=torch.bfloat16, device="cpu")
    weight = 127 * ones
    with suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):
        matrix = round_weight(weight, bits)
        if matrix is not None and torch.equal(matrix.unpacked(), weight.float()):
            products = matrix(ones[:1], None), matrix(ones, None)
            if all((product == _ROWS * 127).all() for product in products):
                return None
    return f"torch {torch.__version__} has no product with weights in {bits} bits for this CPU"


def seconds_a_token(bits: int) -> float:
    """Seconds of one token's product with a weight too large for this CPU's caches."""
    x = torch.ones(1, 2048, dtype=torch.bfloat16, device="cpu")
    weight = torch.ones(1 << 15, 2048, dtype=torch.bfloat16, device="cpu")
    matrix, seconds = (Int4Matrix if bits == 4 else Int8Matrix).of(weight), []
    for _ in range(7):
        start = perf_counter()
        matrix(x, None)
        seconds.append(perf_counter() - start)
    return min(seconds)


def blocks_of(shape: Sequence[int]) -> Iterator[slice]:
    """The rows of a weight in parts that are widened at once."""
    num_rows = max(_BLOCK // shape[1] // _ROWS, 1) * _ROWS
    return (slice(first, first + num_rows) for first in range(0, shape[0], num_rows))


def _best_grid(groups: torch.Tensor) -> torch.Tensor:
    """The bfloat16 scale and zero point (…, 2) of each group (…, 32).

    Either from the least to the largest weight, or as most 4-bit files have them: with the weight
    that is farthest from zero as the first number, and no zero point.
    """
    least, largest = groups.aminmax(dim=-1)
    scale = ((largest - least) / 15).clamp_(min=LEAST).bfloat16().float()
    from_zero = torch.where(-least >= largest, least, largest).div(-8).bfloat16().float()
    from_zero = torch.where(from_zero.abs() < LEAST, torch.full_like(from_zero, LEAST), from_zero)
    grids = [
        torch.stack([scale, (least + 8 * scale).bfloat16().float()], -1),
        torch.stack([from_zero, torch.zeros_like(from_zero)], -1),
    ]
    first, second = (_distance(groups, grid) for grid in grids)
    return torch.where((first < second)[..., None], grids[0], grids[1]).bfloat16()


def _distance(groups: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    scale, zero = grid[..., None].unbind(-2)
    rounded = (_on_grid(groups, scale, zero) - 8).mul_(scale).add_(zero)
    return rounded.sub_(groups).square_().sum(-1)


def _on_grid(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((groups - zero) / scale).round_().add_(8).clamp_(0, 15)
