"""One linear layer, computed from a packed copy of its weight, in one of several ways.

Knows tensors and torch's CPU libraries; not models, nor when packing makes them faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import linear

from selfspec.compat.kernels import (
    float16_packed,
    float16_product,
    reordered,
    reordered_product,
)

__all__ = ["Copy", "Way", "own_linear", "pack_all", "packed_linear", "ways_for"]

_HALVES = (torch.bfloat16, torch.float16)
_TRIED = 8  # The rows and columns of a small product that is tried.
_PART = 1 << 24  # A float16 copy is made of parts of at most this many weights.
# Without a copy, half precision is widened for inputs of at least this many tokens, in blocks of at
# most this many weights, which fit into the CPU's cache.
_WIDE = 32
_BLOCK = 1 << 20


class Copy(Protocol):
    """A packed copy of one weight (O, I)."""

    num_bytes: int

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`linear(x, weight, bias)` for an input (..., I) of the weight's dtype."""
        ...


class Way(NamedTuple):
    """How copies are made. Only private operators of torch pack weights, and any may be missing."""

    name: str
    pack: Callable[[Sequence[torch.Tensor]], list[Copy | None]]
    bytes_per_weight: int
    weights_per_second: float  # about how fast copies are made; a trial finds out more


def ways_for(dtype: torch.dtype) -> list[Way]:
    """The ways in which this build of torch can pack weights of a dtype on this CPU.

    A CPU that can't calculate in half precision gets float16 copies, from which FBGEMM computes in
    float32, or else float32 copies, which take twice the memory.
    """
    same = Way("same", _same_dtype, dtype.itemsize, 5e8)
    ways = [same] if _is_right(same, dtype) else []
    if dtype in _HALVES:
        half = Way("float16", _float16_copies, 2, 1e8 * torch.get_num_threads())
        wide = Way("float32", _float32_copies, 4, 5e8)
        ways += [half] if _is_right(half, dtype) else []
        ways += [wide] if not ways and _is_right(wide, dtype) else []
    return ways


def pack_all(way: Way, weights: Sequence[torch.Tensor]) -> list[Copy | None]:
    """A copy of each weight; None for one that has to be used as it is."""
    return way.pack([weight.detach() for weight in weights])


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, copy: Copy
) -> torch.Tensor:
    """`linear(x, weight, bias)`, computed from the packed copy, without gradients.

    If the input is a single vector or has another dtype than the weight, or under autocast,
    `linear` itself is called.
    """
    if x.dim() < 2 or x.dtype is not weight.dtype or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)
    return copy(x, bias)


def own_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear(x, weight, bias)` without a copy.

    A CPU that can't calculate in half precision multiplies token by token. For a prompt it is three
    times as fast to make float32 of the weight, block by block, each time.
    """
    is_slow = x.dtype is weight.dtype and _is_slow(weight.dtype) and x.device.type == "cpu"
    if not is_slow or x.numel() < _WIDE * x.shape[-1] or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)
    wide, num_rows = x.float(), max(_BLOCK // weight.shape[1], 1)
    outcome = torch.cat([linear(wide, part.float()) for part in torch.split(weight, num_rows)], -1)
    if bias is not None:
        outcome.add_(bias)
    return outcome.to(x.dtype)


class _Reordered:
    """A copy in the order that oneDNN wants, in float32 or in the weight's own dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = reordered(weight)
        self._dtype = weight.dtype
        self.num_bytes = weight.numel() * weight.dtype.itemsize

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide_bias = None if bias is None else bias.to(self._dtype)
        return reordered_product(x.to(self._dtype), self._packed, wide_bias).to(x.dtype)


class _Float16:
    """A copy in float16, from which FBGEMM computes in float32.

    bfloat16 reaches further down than float16, so the weights are multiplied by a power of two
    that brings the largest one near float16's largest number. What is then smaller than 2^-32 times
    the largest weight loses digits.
    """

    def __init__(self, parts: list[object], shape: torch.Size, factor: float) -> None:
        self._parts = parts
        # Times this, an input becomes float32.
        self._unscale = torch.tensor([1 / factor], dtype=torch.float32, device="cpu")
        self.num_bytes = 2 * shape.numel()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = x * self._unscale
        outcomes = [float16_product(wide, part) for part in self._parts]
        outcome = outcomes[0] if len(outcomes) == 1 else torch.cat(outcomes, dim=-1)
        if bias is not None:
            outcome.add_(bias)
        return outcome.to(x.dtype)


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether this is half precision that FBGEMM can pack and the CPU can't calculate in."""
    return dtype in _HALVES and [way.name for way in ways_for(dtype)] == ["float16"]


def _same_dtype(weights: Sequence[torch.Tensor]) -> list[Copy | None]:
    return [_Reordered(weight) for weight in weights]


def _float32_copies(weights: Sequence[torch.Tensor]) -> list[Copy | None]:
    return [_Reordered(weight.float()) for weight in weights]


def _float16_copies(weights: Sequence[torch.Tensor]) -> list[Copy | None]:
    """FBGEMM packs on one core, so threads pack different parts at the same time.

    What they run starts no OpenMP threads, which would stay and slow down later steps.
    """
    factors = [_factor_for(weight) for weight in weights]
    packable = [(i, weight) for i, weight in enumerate(weights) if factors[i]]
    owned = [(i, part) for i, weight in packable for part in _parts_of(weight)]
    parts: list[list[object]] = [[] for _ in weights]
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as pool:
        for first in range(0, len(owned), num_threads):  # Few are widened at the same time.
            some = owned[first : first + num_threads]
            wide = [part.float() * factors[i] for i, part in some]
            for (i, _), packed in zip(some, pool.map(float16_packed, wide), strict=True):
                parts[i].append(packed)
    each = zip(parts, weights, factors, strict=True)
    return [_Float16(packed, w.shape, factor) if factor else None for packed, w, factor in each]


def _parts_of(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """The weight in equal parts by rows, so that a large one is packed by several threads."""
    num_rows, num_in = weight.shape
    num_parts = -(-num_rows * num_in // _PART)
    return torch.split(weight, -(-num_rows // num_parts))


def _factor_for(weight: torch.Tensor) -> float:
    """The power of two that brings the largest weight between 2^14 and 2^15; 1 for float16.

    0 if a weight is not finite, for which FBGEMM would put its largest number.
    """
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        return 0.0
    if weight.dtype is torch.float16 or not largest:
        return 1.0
    return 2.0 ** (15 - math.frexp(largest)[1])


@cache
def _is_right(way: Way, dtype: torch.dtype) -> bool:
    """Whether small products of this dtype are right."""
    x, weight = torch.ones(2, _TRIED, _TRIED, dtype=dtype, device="cpu")
    try:
        (copy,) = way.pack([weight])
        return copy is not None and torch.equal(copy(x, weight[0].clone()), (_TRIED + 1) * weight)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
