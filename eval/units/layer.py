"""A decoder layer over the nodes of a tree, whose work two units share.

Linear layers are split by columns of their outcome. The first unit attends to the committed text,
which needs no mask, the second one to the tree; the two are joined by their log-sum-exp. Positions
are left out: rotating them takes no time beside the products.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu

from eval.models.shapes import GrownShape
from eval.units.unit import Pair, Task, Unit
from selfspec.run.layout import ancestors
from selfspec.run.two_parts import dense_part

__all__ = ["KINDS", "Layer", "Shared", "tree_parents"]

KINDS = ("qkv", "out", "gate_up", "down")  # the linear layers; a share is found for each
_STEP = 16  # A share is rounded to so many columns.

Tensors = Sequence[torch.Tensor]


def tree_parents(width: int) -> list[int]:
    """The parents of a tree of so many nodes: each hangs on one of the three nodes before it.

    >>> tree_parents(8)
    [-1, 0, 1, 0, 2, 3, 4, 5]
    """
    chance = random.Random(0)
    return [-1, *(chance.randrange(max(0, node - 3), node) for node in range(1, width))]


@dataclass(frozen=True)
class Layer:
    """The weights of a layer, the committed text's keys and values, and the tree's mask."""

    shape: GrownShape
    weights: Mapping[str, tuple[torch.Tensor, ...]]  # by kind: matrices (columns, inputs)
    text: tuple[torch.Tensor, torch.Tensor]  # (1, heads of keys, columns, D)
    mask: torch.Tensor  # (1, 1, group * W, W): additive

    @classmethod
    def random(cls, shape: GrownShape, num_columns: int, width: int) -> Layer:
        """Weights that keep the size of what they multiply."""
        generator = torch.Generator().manual_seed(0)
        hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads

        def matrix(columns: int, inputs: int) -> torch.Tensor:
            return torch.randn(columns, inputs, generator=generator) / inputs**0.5

        weights = {
            "qkv": (matrix((heads + 2 * kv_heads) * dim, hidden),),
            "out": (matrix(hidden, heads * dim),),
            "gate_up": (matrix(inner, hidden), matrix(inner, hidden)),
            "down": (matrix(hidden, inner),),
        }
        text = torch.randn(2, 1, kv_heads, num_columns, dim, generator=generator)
        sees = torch.from_numpy(ancestors([tree_parents(width)], width).copy())
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        return cls(
            shape, weights, (text[0], text[1]), mask[None].repeat(1, 1, heads // kv_heads, 1)
        )

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries joined by the head of keys that they share, keys and values: (1, H, N, D)."""
        shape, width = self.shape, len(qkv)
        heads = qkv.view(width, -1, shape.head_dim).transpose(0, 1)[None]
        kv_heads = shape.num_key_value_heads
        query, key, value = heads.split([shape.num_attention_heads, kv_heads, kv_heads], dim=1)
        return query.reshape(1, kv_heads, -1, shape.head_dim), key, value

    def rows(self, outcome: torch.Tensor, width: int) -> torch.Tensor:
        """Joined heads as rows again: (W, heads * D)."""
        heads = outcome.reshape(self.shape.num_attention_heads, width, -1)
        return heads.transpose(0, 1).reshape(width, -1)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives (W, hidden), by masked attention and whole matrices."""
        (qkv,), (out,), (gate, up), (down,) = (self.weights[kind] for kind in KINDS)
        query, *tree = self.heads(linear(_normed(x), qkv))
        key, value = (torch.cat(both, dim=2) for both in zip(self.text, tree, strict=True))
        mask = pad(self.mask, (self.text[0].shape[2], 0))
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + linear(self.rows(attended, len(x)), out)
        normed = _normed(x)
        return x + linear(silu(linear(normed, gate)) * linear(normed, up), down)


class _Piece(NamedTuple):
    """The columns of a linear layer that one unit has, on its device."""

    matrices: tuple[torch.Tensor, ...]

    @classmethod
    def on(cls, unit: Unit, matrices: Iterable[torch.Tensor]) -> _Piece:
        """Views of these matrices, or copies if the unit is another device."""
        return cls(tuple(matrix.to(unit.device) for matrix in matrices))

    def task(self, x: torch.Tensor) -> Task | None:
        """Computes these columns (W, columns) on the CPU's side; None if there are none."""
        return (lambda: self._columns(x)) if len(self.matrices[0]) else None

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = (linear(x.to(matrix.device), matrix) for matrix in self.matrices)
        for other in others:  # The same columns of gate and up meet in one unit.
            first = silu(first) * other
        return first.cpu()


class Shared:
    """A layer whose work two units share; `shares` says how much of each kind the first one has."""

    def __init__(self, layer: Layer, units: Pair, shares: Mapping[str, float]) -> None:
        self._layer = layer
        self._units = units
        self._pieces = {kind: _pieces(layer, units, kind, shares[kind]) for kind in KINDS}
        # A unit that has no column of any layer takes no part in attention either.
        self._alone = {1.0: units.first, 0.0: units.second}.get(sum(shares.values()) / len(KINDS))
        self._dense_device = (self._alone or units.first).device
        self._text = [part.to(self._dense_device) for part in layer.text]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives (W, hidden)."""
        qkv = self._linear("qkv", _normed(x))
        x = x + self._linear("out", self._layer.rows(self._attended(qkv), len(x)))
        return x + self._linear("down", self._linear("gate_up", _normed(x)))

    def tasks(self, kind: str, x: torch.Tensor) -> tuple[Task | None, Task | None]:
        """Both units' parts of a linear layer."""
        first, second = self._pieces[kind]
        return first.task(x), second.task(x)

    def _linear(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._units.run(*self.tasks(kind, x)), dim=-1)

    def _attended(self, qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = self._layer.heads(qkv)
        scale = query.shape[-1] ** -0.5

        def dense() -> Tensors:
            found = dense_part(query.to(self._dense_device), *self._text, scale)
            return [tensor.cpu() for tensor in found]

        def sparse() -> Tensors:
            scores = query @ key.mT * scale + self._layer.mask
            return scores.softmax(-1) @ value, scores.logsumexp(-1)

        def both() -> torch.Tensor:
            return _joined(dense(), sparse())

        if self._alone is None:
            return _joined(*self._units.run(dense, sparse))
        first, second = (both if unit is self._alone else None for unit in self._units)
        outcome: torch.Tensor
        (outcome,) = self._units.run(first, second)
        return outcome


def _joined(dense: Tensors, sparse: Tensors) -> torch.Tensor:
    """Both parts, weighted by their log-sum-exp."""
    weight = torch.sigmoid(dense[1] - sparse[1])[..., None]
    return torch.lerp(sparse[0], dense[0], weight)


def _pieces(layer: Layer, units: Pair, kind: str, share: float) -> tuple[_Piece, _Piece]:
    """The first columns for the first unit, and the others for the second one."""
    matrices = layer.weights[kind]
    number = round(share * len(matrices[0]) / _STEP) * _STEP
    first, second = zip(*(matrix.tensor_split([number]) for matrix in matrices), strict=True)
    return _Piece.on(units.first, first), _Piece.on(units.second, second)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
