"""Ghidorah's attention in two parts: the committed text without a mask, and the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensors = Sequence[torch.Tensor]


class Parts(NamedTuple):
    """What one layer asks; heads that share keys are joined into one with more queries."""

    query: torch.Tensor  # (B, H, N, D)
    text: Tensors  # The committed text's keys and values, (B, H, columns, D) each.
    tree: Tensors  # Those of the tree, (B, H, nodes, D).
    mask: torch.Tensor  # (B, 1, N, nodes): additive, over the tree

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return float(self.query.shape[-1] ** -0.5)


def in_two_parts(parts: Parts) -> torch.Tensor:
    """The outcome (B, H, N, D); equal to that of masked attention, except for rounding.

    The dense part needs no mask, so torch's fast kernel computes it. Next to the tree's keys, the
    committed text is one more key: its score is that part's log-sum-exp, its value the outcome.
    """
    key, value = parts.text
    text, score = attention_and_sums(parts.query, key, value, parts.scale)
    # In half precision a rounded score would be off by more than torch's own kernels are.
    nodes = parts.query.float() @ parts.tree[0].float().mT
    scores = torch.cat([nodes * parts.scale + parts.mask, score[..., None]], dim=-1)
    weights = scores.softmax(dim=-1)
    tree = weights[..., :-1] @ parts.tree[1].float()
    return torch.addcmul(tree, text.float(), weights[..., -1:]).to(parts.query.dtype)


def attention_and_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask (B, H, N, D), and the log-sum-exp of its scores (B, H, N).

    torch has no public call that gives both on every device.
    """
    aten = torch.ops.aten
    if query.device.type == "cpu":
        outcome, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, scale=scale
        )
    elif query.dtype is torch.float32:
        outcome, sums, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, scale=scale
        )
    else:
        outcome, sums, *_ = aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    return outcome, sums[..., : query.shape[2]]  # Some kernels fill up to a multiple of 32.
