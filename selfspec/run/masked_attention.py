"""Attention under a mask on CUDA, by one kernel that is called directly.

`scaled_dot_product_attention` may choose cuDNN, which makes a plan for each new number of keys and
takes up to some hundred milliseconds for it; and each step has a new number. The choice is a
setting of the whole process, so another thread would see it changed.

That kernel has a block of threads for each head and 64 queries, which leaves most of a card idle
while a tree is verified. So where the keys are long and their number is round, as for captured
forwards, they are cut into parts. Each part is attended to by itself, as if it were a head, and the
outcomes are joined by their log-sum-exp. No length has to be known on the CPU.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from selfspec.compat.kernels import efficient_attention

__all__ = ["is_on_card", "mask_for_kernel", "masked_attention"]

_ALIGNED = 8  # The kernel reads this many numbers of a mask at once.
_BYTES = 16
_QUERIES = 64  # A block of threads works on this many.
_LEAST_PART = 512  # The keys of a part, at least: joining takes time, too.
_LEAST_PARTS = 4
# Hidden enough: no score is near it, and a part that is hidden whole has a finite log-sum-exp.
_HIDDEN = -3e4


def masked_attention(
    query: torch.Tensor,  # (B, H, N, D)
    key: torch.Tensor,  # (B, H, columns, D)
    value: torch.Tensor,
    mask: torch.Tensor | None,  # (B, 1, N or 1, columns), from `mask_for_kernel`
    *,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """The outcome (B, H, N, D)."""
    if mask is None or dropout or not _has_kernel(query, key, value, mask):
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
        )
    number = _num_parts(query, key.shape[2])
    if number == 1:
        bias = mask.expand(*query.shape[:3], -1)
        return efficient_attention(query, key, value, bias, False, scale)[0]  # type: ignore[no-any-return]
    rows = zip(query, key, value, mask, strict=True)
    return torch.stack([_in_parts(*row, number, scale) for row in rows])


def mask_for_kernel(mask: torch.Tensor) -> torch.Tensor:
    """A mask (..., columns) as the kernel needs it: in memory that it can read, and finite.

    A mask of truths, as models make their own, is left to torch.
    """
    if mask.dtype == torch.bool or not is_on_card(mask.device):
        return mask
    columns = mask.shape[-1]
    wide = mask.new_empty(*mask.shape[:-1], -(-columns // _ALIGNED) * _ALIGNED)
    return wide[..., :columns].copy_(mask).clamp_(min=_HIDDEN)


def _in_parts(
    query: torch.Tensor,  # (H, N, D)
    key: torch.Tensor,  # (H, columns, D)
    value: torch.Tensor,
    mask: torch.Tensor,  # (1, N or 1, columns)
    number: int,
    scale: float | None,
) -> torch.Tensor:
    """The outcome (H, N, D) of one row; nothing of keys and values is copied."""
    heads, num_queries, _ = query.shape
    part = key.shape[1] // number
    bias = mask.expand(1, num_queries, -1).reshape(1, num_queries, number, part)
    outcomes, sums, *_ = efficient_attention(
        query[:, None].expand(-1, number, -1, -1),
        key.view(heads, number, part, -1),
        value.view(heads, number, part, -1),
        bias.transpose(1, 2).expand(heads, -1, -1, -1),
        True,
        scale,
    )
    weights = sums[..., :num_queries].softmax(1)[..., None]  # The kernel fills up to 32.
    outcome: torch.Tensor = (weights * outcomes).sum(1)
    return outcome.to(query.dtype)


def _has_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> bool:
    """Can the kernel compute this? Its own check is a part of the choice that is left out."""
    if not is_on_card(query.device):
        return False
    tensors, size = (query, key, value), query.element_size()
    return (
        query.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and key.dtype == value.dtype == mask.dtype == query.dtype
        and query.shape[-1] == key.shape[-1]
        and all(part.shape[-1] * size % _BYTES == 0 for part in tensors)
        and all(part.stride(-1) == 1 and part.data_ptr() % _BYTES == 0 for part in tensors)
    )


def is_on_card(device: torch.device) -> bool:
    """Is this a CUDA device on which torch has the kernel for every precision?"""
    return device.type == "cuda" and _is_new_card(device)


@cache
def _is_new_card(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def _num_parts(query: torch.Tensor, num_columns: int) -> int:
    """Into how many parts to cut the keys; 1 if that would not pay.

    The parts of a row are one launch, so there must be more parts than rows.
    """
    rows, heads, width, _ = query.shape
    blocks = rows * heads * -(-width // _QUERIES)
    most = min(_num_processors(query.device) // blocks, num_columns // _LEAST_PART)
    number = 1 << max(most.bit_length() - 1, 0)
    while number > 1 and num_columns % (number * _ALIGNED):
        number //= 2
    return number if number >= max(_LEAST_PARTS, 2 * rows) else 1


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
