"""The formats in which a matrix of weights can be packed, and products with packed matrices.

`reorder` keeps the weight's dtype, in the order in which oneDNN reads it. `pack_float16` is for
half precision on a CPU that can't calculate in it: FBGEMM multiplies from float16 in float32.
Knows tensors and torch's CPU libraries; nothing of layers, nor when packing pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Protocol

import torch

from selfspec.compat.kernels import (
    float16_packed,
    float16_product,
    float16_unpacked,
    reordered,
    reordered_product,
)
from selfspec.machine.device import calculates_in

_HALVES = (torch.bfloat16, torch.float16)
_TRIED = 8  # Each format is tried on a matrix with this many rows and columns.
_PART = 1 << 24  # One thread packs at most this many weights at a time in float16.


class PackedMatrix(Protocol):
    """One weight (O, I) in a packed format, which takes as much memory as the weight.

    One of an embedding has `rows(ids)` too.
    """

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`linear(x, weight, bias)` for an input (..., I) of the weight's dtype."""
        ...

    def unpacked(self) -> torch.Tensor:
        """The weight; values that float16 can't hold come back rounded."""
        ...


Packer = Callable[[Sequence[torch.Tensor]], list[PackedMatrix | None]]


@cache
def packer_for(dtype: torch.dtype) -> Packer | None:
    """What packs weights of a dtype for this CPU; None where this build of torch has nothing right.

    On a CPU that calculates in half precision, prompts take up to 60 % longer from float16.
    """
    is_wide = dtype in _HALVES and not calculates_in(dtype)
    packers = (pack_float16, reorder) if is_wide else (reorder,)
    return next((packer for packer in packers if _is_right(packer, dtype)), None)


class _Reordered:
    """A weight in oneDNN's order and in its own dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = reordered(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return reordered_product(x, self._packed, bias)

    def unpacked(self) -> torch.Tensor:
        weight: torch.Tensor = self._packed.to_dense()
        return weight


class _Float16:
    """A weight in float16, in parts by rows, from which FBGEMM computes in float32.

    float16 can't hold bfloat16's smallest numbers. So weights are multiplied by a power of two that
    brings the largest one near float16's largest number, and inputs are divided by it. Weights
    below 2^-32 times the largest one lose digits.
    """

    def __init__(self, parts: list[object], dtype: torch.dtype, factor: float) -> None:
        self._parts = parts
        self._dtype = dtype
        # A float32 tensor: an input in half precision that is multiplied by it becomes float32.
        self._unscale = torch.tensor([1 / factor], dtype=torch.float32, device="cpu")

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = x * self._unscale
        outputs = [float16_product(wide, part) for part in self._parts]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if bias is not None:
            output.add_(bias)
        return output.to(x.dtype)

    def unpacked(self) -> torch.Tensor:
        parts = [float16_unpacked(part).mul_(self._unscale) for part in self._parts]
        with torch.autocast("cpu", enabled=False):  # It can't join tensors of half precision.
            return torch.cat([part.to(self._dtype) for part in parts])


def reorder(weights: Sequence[torch.Tensor]) -> list[PackedMatrix | None]:
    return [_Reordered(weight) for weight in weights]


def pack_float16(weights: Sequence[torch.Tensor]) -> list[PackedMatrix | None]:
    """None for a weight that is not finite. FBGEMM packs on one core, so each thread has a part.

    `float16_packed` starts no OpenMP threads. In threads of ours these would stay, and slow down
    all later steps.
    """
    factors = [_factor_for(weight) for weight in weights]
    owned = [(i, part) for i, weight in enumerate(weights) if factors[i] for part in _split(weight)]
    parts: list[list[object]] = [[] for _ in weights]
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as pool:
        for first in range(0, len(owned), num_threads):  # Only these are in memory in float32.
            some = owned[first : first + num_threads]
            wide = [part.float() * factors[i] for i, part in some]
            for (i, _), packed in zip(some, pool.map(float16_packed, wide), strict=True):
                parts[i].append(packed)
    rows = zip(parts, weights, factors, strict=True)
    return [_Float16(packed, w.dtype, factor) if factor else None for packed, w, factor in rows]


def _split(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """The weight in equal parts by rows, so that several threads pack a large one."""
    num_rows, num_in = weight.shape
    num_parts = -(-num_rows * num_in // _PART)
    return torch.split(weight, -(-num_rows // num_parts))


def _factor_for(weight: torch.Tensor) -> float:
    """The power of two that brings the largest weight between 2^14 and 2^15; 1 for float16.

    0 if a weight is not finite: FBGEMM would put its largest number in place of it.
    """
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        return 0.0
    if weight.dtype is torch.float16 or not largest:
        return 1.0
    return 2.0 ** (15 - math.frexp(largest)[1])


def _is_right(packer: Packer, dtype: torch.dtype) -> bool:
    """Is a small product right in this format, and does the weight come back?

    Only private operators of torch pack weights. A build may lack them or have changed them.
    """
    x, weight = torch.ones(2, _TRIED, _TRIED, dtype=dtype, device="cpu")
    try:
        (matrix,) = packer([weight])
        if matrix is None or not torch.equal(matrix.unpacked(), weight):
            return False
        return torch.equal(matrix(x, weight[0].clone()), (_TRIED + 1) * weight)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
