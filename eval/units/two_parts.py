"""Attention over drafts in two parts: the committed text, and the tree behind it.

Every node sees the whole committed text, so this part needs no mask, and torch's fast kernel
computes it for all nodes at once. The tree has few keys, which a small product asks under the mask
of ancestors. The two are joined by their log-sum-exp: beside the tree's keys, the committed text
is one more key. Its score is its log-sum-exp, and its value is what the first part gave.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Parts", "attention_and_sums", "in_two_parts"]

_aten = torch.ops.aten


class Parts(NamedTuple):
    """What one layer asks; heads that share keys are joined into one with more queries."""

    query: torch.Tensor  # (B, H, N, D)
    key: torch.Tensor  # (B, H, columns, D)
    value: torch.Tensor
    mask: torch.Tensor  # (B, 1, N, nodes): additive, over the last columns; the others are open
    scale: float

    @property
    def num_open(self) -> int:
        """How many columns every query sees."""
        return self.key.shape[2] - self.mask.shape[-1]


def in_two_parts(parts: Parts) -> torch.Tensor:
    """The outcome (B, H, N, D); equal to that of masked attention, except for rounding."""
    front = parts.num_open
    text, score = attention_and_sums(
        parts.query, parts.key[:, :, :front], parts.value[:, :, :front], parts.scale
    )
    # In half precision a rounded score would be off by more than torch's own kernels are.
    nodes = parts.query.float() @ parts.key[:, :, front:].float().mT
    scores = torch.cat([nodes * parts.scale + parts.mask, score[..., None]], dim=-1)
    weights = scores.softmax(dim=-1)
    tree = weights[..., :-1] @ parts.value[:, :, front:].float()
    return torch.addcmul(tree, text.float(), weights[..., -1:]).to(parts.query.dtype)


def attention_and_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask (B, H, N, D), and the log-sum-exp of its scores (B, H, N).

    torch has no public call that gives both on every device.
    """
    if query.device.type == "cpu":
        outcome, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, scale=scale
        )
    elif query.dtype is torch.float32:
        outcome, sums, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, scale=scale
        )
    else:
        outcome, sums, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, scale=scale
        )
    return outcome, sums[..., : query.shape[2]]  # Some kernels fill up to a multiple of 32.
