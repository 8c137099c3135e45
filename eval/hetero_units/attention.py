"""One layer's attention over a tree in two parts, on one unit or on two.

Every node sees the whole committed text, so this part needs no mask, and torch's fast kernel
computes it for all nodes at once. The tree has few keys, which a small product asks under the mask
of ancestors. The two are joined by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from eval.hetero_units.unit import Pair, Unit
from selfspec.forward.layout import ancestors

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


def tree_mask(parents: list[int]) -> torch.Tensor:
    """Additive (1, 1, W, W): a node sees itself and its ancestors."""
    sees = torch.from_numpy(ancestors([parents], len(parents)).copy())
    return torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None]


def _joined(first: Tensors, second: Tensors) -> torch.Tensor:
    """Both parts of attention, weighted by their log-sum-exp."""
    weight = torch.sigmoid(first[1] - second[1])[..., None]
    return torch.lerp(second[0], first[0], weight)


def _of_tree(parts: Parts) -> Tensors:
    """The tree's part of attention, and the log-sum-exp of its scores."""
    scores = parts.query @ parts.tree[0].mT * parts.scale + parts.mask
    return scores.softmax(-1) @ parts.tree[1], scores.logsumexp(-1)


def _of_text(parts: Parts) -> Tensors:
    """The text's part of attention, and the log-sum-exp of its scores.

    No public call of torch gives both.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended, sums = attention(parts.query, *parts.text, scale=parts.scale)
    return attended, sums[..., : parts.query.shape[2]]  # Some kernels fill up to a multiple of 32.


class OnTwoUnits:
    """The first unit has the text, the second one the tree. A unit that is `alone` has both."""

    def __init__(self, units: Pair, alone: Unit | None = None) -> None:
        self._units, self._alone = units, alone

    def __call__(self, parts: Parts) -> torch.Tensor:
        """What attention gives, (1, H, N, D)."""
        if self._alone is None:
            both = self._units.run(lambda: _of_text(parts), lambda: _of_tree(parts))
            return _joined(*both)
        task = partial(_joined_alone, parts)
        first, second = (task if unit is self._alone else None for unit in self._units)
        (attended,) = self._units.run(first, second)
        return attended


def _joined_alone(parts: Parts) -> torch.Tensor:
    return _joined(_of_text(parts), _of_tree(parts))
