"""Operators of torch without a public name. Each may be missing in a build or in a version."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",
    "attention_and_sums",
    "calculates_in_half",
    "copies_between_devices",
    "efficient_attention",
    "float16_packed",
    "float16_product",
    "has_float16_product",
    "is_out_of_memory",
    "reordered",
    "reordered_product",
    "tree_leaves",
]

_TYPICAL = 8  # oneDNN packs weights for inputs of about this many tokens.
_aten = torch.ops.aten

copies_between_devices = (_aten.copy_, _aten._to_copy)


def calculates_in_half(name: str) -> bool:
    """Has oneDNN instructions for ``"bf16"`` or ``"fp16"`` on this CPU? True if it can't be asked.

    Without the answer, half precision is not widened, and prompts are read more slowly.
    """
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return ask is None or bool(ask())


def is_out_of_memory(error: BaseException) -> bool:
    """Does an error say that memory ran out? On a CPU, torch says it in words alone."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def reordered(weight: torch.Tensor) -> Any:
    """A weight in the order that oneDNN wants. Without it, there are no copies in float32."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL)


def reordered_product(x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` with a weight that was reordered."""
    outcome: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, packed, bias, "none", [], ""
    )
    return outcome


def has_float16_product() -> bool:
    """Has this torch the product of `float16_packed`?"""
    return hasattr(torch.ops.quantized, "linear_prepack_fp16")


def float16_packed(weight: torch.Tensor) -> object:
    """A float32 weight in float16, as FBGEMM wants it.

    A part of torch that its authors plan to remove. Without it, CPUs that can't calculate in half
    precision get copies in float32, which take twice the memory.
    """
    return torch.ops.quantized.linear_prepack_fp16(weight, None)


def float16_product(x: torch.Tensor, packed: object) -> torch.Tensor:
    """`linear` in float32 with a weight that was packed in float16."""
    outcome: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return outcome


def attention_and_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask (B, H, N, D), and the log-sum-exp of its scores (B, H, N).

    torch has no public call that gives both on every device. Raises what the operators raise;
    without them, attention is never computed in two parts.
    """
    if query.device.type == "cpu":
        outcome, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, scale=scale
        )
    elif query.dtype is torch.float32:
        outcome, sums, *_ = efficient_attention(query, key, value, None, True, scale)
    else:
        outcome, sums, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, scale=scale
        )
    return outcome, sums[..., : query.shape[2]]  # Some kernels fill up to a multiple of 32.


def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    needs_sums: bool,
    scale: float | None,
) -> Any:
    """The masked kernel for CUDA: the outcome, and the log-sum-exp of the scores, and more."""
    kernel = _aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, needs_sums, scale=scale)
