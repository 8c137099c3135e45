"""One linear layer over a packed copy of its weight.

Knows tensors and torch's CPU library; not models, nor when packing pays.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear

__all__ = ["can_pack", "pack", "packed_bytes", "packed_linear"]

_HALVES = (torch.bfloat16, torch.float16)
_TYPICAL = 8  # tokens: the library lays weights out for about so many


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy (O, I) that only `packed_linear` can read; `RuntimeError` if there is no such thing.

    torch offers this order of weights through private operators alone. Where a build of torch lacks
    them, or they want other arguments, nothing is packed.
    """
    return _reordered(weight.detach().to(_copy_dtype(weight.dtype)))


def can_pack(dtype: torch.dtype) -> bool:
    """Does this build of torch pack weights of this dtype, and multiply with them?"""
    return _tried(dtype) or (dtype in _HALVES and _tried(torch.float32))


def packed_bytes(weight: torch.Tensor) -> int:
    """What a copy takes, or a little more."""
    return weight.numel() * _copy_dtype(weight.dtype).itemsize


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packed: torch.Tensor
) -> torch.Tensor:
    """`linear(x, weight, bias)`, computed from the copy; nothing is kept for gradients.

    An input of another dtype than the weight is left to `linear`, and so is autocast.
    """
    if x.dtype is not weight.dtype or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)
    wide_bias = None if bias is None else bias.to(packed.dtype)
    return _product(x.to(packed.dtype), packed, wide_bias).to(x.dtype)


def _copy_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is widened where a CPU can't calculate in it."""
    return torch.float32 if dtype in _HALVES and not _tried(dtype) else dtype


@cache
def _tried(dtype: torch.dtype) -> bool:
    """Does a small product come out right?"""
    x, weight = torch.ones(2, _TYPICAL, _TYPICAL, dtype=dtype, device="cpu")
    bias = weight[0].contiguous()
    try:
        return torch.equal(_product(x, _reordered(weight), bias), linear(x, weight, bias))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL)  # type: ignore[no-any-return]


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]
