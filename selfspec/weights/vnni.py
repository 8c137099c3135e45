"""Weights in 8 bits by products of whole numbers, on a CPU that has these (VNNI).

With a billion weights on two cores they read prompts nearly twice as fast as `weights/rounded`, and
a step of several tokens takes little longer than one of a single token.

Inputs are rounded to 8 bits, too. Before weights and inputs are rounded, both are rotated: each
block of 64 columns is multiplied by an orthogonal matrix of ones and minus ones. The product stays
the same. A single large value, which would make the steps of rounding large, is spread over its
block. All sums are of whole numbers and therefore exact. So a token gets the same bits, whether it
is alone in a forward or among others.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch

from selfspec.compat.kernels import int8_packed, int8_unpacked, int8_vnni_product
from selfspec.weights.rounded import LARGEST, LEAST, RoundedMatrix, blocks_of

_BLOCKS = (64, 16)  # Columns that are rotated together: the first of these that divides them all.


def _constant(value: float) -> torch.Tensor:
    """A number of Python would be made a tensor anew in each product, which takes longer."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


# Inputs are rotated as whole numbers up to 2^17. Sums of 64 of these are exact in float32.
_FINE_STEP = _constant(1 / (1 << 17))
_STEP = _constant(1 / LARGEST)
_LEAST = _constant(LEAST)
# Added to a float32, this rounds it and leaves it in the lowest bits, as a byte whose zero is 128.
_TO_BYTE = _constant((1 << 23) + 128)


class VnniMatrix(RoundedMatrix):
    """Packed whole numbers (O, I) of a rotated weight, and a scale for each row."""

    bits = 8

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__(numbers, scales)
        self._zeros = torch.zeros_like(scales, dtype=torch.int64)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = x.reshape(-1, x.shape[-1]).float()
        output = self._product(wide).view(*x.shape[:-1], -1)
        if bias is not None:
            output.add_(bias)
        return output.to(x.dtype)

    @property
    def num_bytes(self) -> int:
        return self.numbers.numel() + self.scales.nbytes

    @classmethod
    def of(cls, weight: torch.Tensor) -> VnniMatrix:
        numbers = torch.empty(weight.shape, dtype=torch.int8, device="cpu")
        scales = torch.empty(len(weight), dtype=torch.float32, device="cpu")
        for rows in blocks_of(weight.shape):
            wide = _rotated(weight[rows].detach().float())
            scales[rows] = wide.abs().amax(1).div_(LARGEST).add_(LEAST)
            numbers[rows] = (wide / scales[rows, None]).round_()
        return cls(int8_packed(numbers), scales.div_(_block(weight.shape[1])))

    def unpacked(self) -> torch.Tensor:
        return _rotated(int8_unpacked(self.numbers).float()).mul_(self.scales[:, None])

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """The product (T, O), in float32, as the input (T, I): few and simple operations."""
        fine = x.abs().amax(-1, keepdim=True).mul_(_FINE_STEP).add_(_LEAST)
        whole = _rotated((x / fine).round_())
        scale = whole.abs().amax(-1, keepdim=True).mul_(_STEP).add_(_LEAST)
        numbers = whole.div_(scale).add_(_TO_BYTE).view(torch.int32).to(torch.uint8)
        sums = int8_vnni_product(numbers, self.numbers, self.scales, self._zeros)
        return sums.mul_(scale.mul_(fine))


class VnniRows(VnniMatrix):
    """The same for a head that shares its weight with an embedding, which reads rows of a copy."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__(numbers, scales)
        self._copy = int8_unpacked(numbers)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._copy.nbytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """These rows, as an embedding reads them, in float32."""
        values = _rotated(self._copy[ids.view(-1)].float()).view(*ids.shape, -1)
        return values.mul_(self.scales[ids][..., None])


@cache
def has_vnni() -> bool:
    """Does this CPU get products of large whole numbers right, as one with VNNI does?"""
    ones = torch.ones(64, 64, dtype=torch.float32, device="cpu")
    with suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):
        return bool((VnniMatrix.of(ones)(ones[:4], None) - 64).abs().max() < 1)
    return False


def _block(num_in: int) -> int:
    """How many columns are rotated together."""
    return next(block for block in _BLOCKS if num_in % block == 0)


@cache
def _rotation(block: int) -> torch.Tensor:
    """A symmetric matrix of ones and minus ones, orthogonal but for the factor `block`.

    In a matrix of Sylvester's kind, the first column is all ones and would gather the mean of an
    input. Here the sums of all columns are equal.
    """
    four = 1 - 2 * torch.eye(4, dtype=torch.float32, device="cpu").flip(0)
    return four if block == 4 else torch.kron(_rotation(block // 4), four)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """A float32 (N, I), with each block of columns times its rotation."""
    block = _block(x.shape[1])
    return torch.mm(x.view(-1, block), _rotation(block)).view(x.shape)
