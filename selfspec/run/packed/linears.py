"""One linear layer, computed from a packed copy of its weight.

Knows tensors and torch's CPU library; not models, nor when packing makes them faster.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear

__all__ = ["can_pack", "pack", "packed_bytes", "packed_linear"]

_HALVES = (torch.bfloat16, torch.float16)
_TYPICAL = 8  # The library packs weights for inputs of about so many tokens.


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy (O, I) that only `packed_linear` can read; raises `RuntimeError` if torch can't.

    Only private operators of torch pack weights. Ask `can_pack` first, since a build of torch may
    lack them or want other arguments.
    """
    return _reordered(weight.detach().to(_copy_dtype(weight.dtype)))


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch can pack weights of this dtype and multiply with them."""
    return _tried(dtype) or (dtype in _HALVES and _tried(torch.float32))


def packed_bytes(weight: torch.Tensor) -> int:
    """How many bytes a copy takes at most."""
    return weight.numel() * _copy_dtype(weight.dtype).itemsize


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packed: torch.Tensor
) -> torch.Tensor:
    """`linear(x, weight, bias)`, computed from the packed copy, without gradients.

    If the input has another dtype than the weight, or under autocast, `linear` itself is called.
    """
    if x.dtype is not weight.dtype or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)
    wide_bias = None if bias is None else bias.to(packed.dtype)
    return _product(x.to(packed.dtype), packed, wide_bias).to(x.dtype)


def _copy_dtype(dtype: torch.dtype) -> torch.dtype:
    """The copy's dtype: float32 instead of half precision if the CPU can't calculate in that."""
    return torch.float32 if dtype in _HALVES and not _tried(dtype) else dtype


@cache
def _tried(dtype: torch.dtype) -> bool:
    """Whether a small product of this dtype is right."""
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
