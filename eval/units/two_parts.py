"""Ghidorah's attention in two parts: the committed text without a mask, and the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from selfspec.compat.kernels import attention_and_sums

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
