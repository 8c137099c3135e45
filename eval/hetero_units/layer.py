"""A decoder layer over the nodes of a tree, whose work two units share.

Linear layers are split by columns of their outcome, and attention as `OnTwoUnits` does it.
`ByRows` is the way of Megatron-LM: every second linear layer is split by rows, and what both units
give is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu

from eval.hetero_units.attention import OnTwoUnits, Parts, Tensors
from eval.hetero_units.unit import Pair, Task
from eval.models.shapes import GrownShape

KINDS = ("qkv", "out", "gate_up", "down")  # The linear layers; a share is found for each.
_STEP = 16  # A share is rounded to so many columns.
_ROUNDS = 10
_REFINEMENTS = 2  # Times depend on the split itself, so a found split is profiled again.


@dataclass(frozen=True)
class Layer:
    """The weights of a layer, the committed text's keys and values, and the tree's mask."""

    shape: GrownShape
    weights: Mapping[str, tuple[torch.Tensor, ...]]  # by kind: matrices (columns, inputs)
    text: Tensors  # Keys and values, (1, heads of keys, columns, D).
    mask: torch.Tensor  # (1, 1, group * W, W): additive
    rotation: Tensors  # Cosines and sines, (W, D).
    eps: float  # of the norms

    def part(self, heads: slice, inner: slice) -> Layer:
        """The layer with these heads of keys, what belongs to them, and that much of the MLP."""
        shape, (qkv,), (out,) = self.shape, self.weights["qkv"], self.weights["out"]
        dim, group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        queries = slice(group * dim * heads.start, group * dim * heads.stop)
        keys = slice(dim * heads.start, dim * heads.stop)
        sizes = [shape.num_attention_heads * dim, *2 * [shape.num_key_value_heads * dim]]
        rows = zip(qkv.split(sizes), (queries, keys, keys), strict=True)
        number = heads.stop - heads.start
        changed = {"num_attention_heads": group * number, "num_key_value_heads": number}
        return replace(
            self,
            shape=replace(shape, **changed),
            weights={
                "qkv": (torch.cat([matrix[row] for matrix, row in rows]),),
                "out": (out[:, queries].contiguous(),),
                "gate_up": tuple(matrix[inner] for matrix in self.weights["gate_up"]),
                "down": (self.weights["down"][0][:, inner].contiguous(),),
            },
            text=[part[:, heads] for part in self.text],
        )

    def parts(self, qkv: torch.Tensor) -> Parts:
        """What attention asks, from the outcome of the first linear layer (W, columns)."""
        shape, width = self.shape, len(qkv)
        heads = qkv.view(width, -1, shape.head_dim).transpose(0, 1)[None]
        kv_heads = shape.num_key_value_heads
        query, key, value = heads.split([shape.num_attention_heads, kv_heads, kv_heads], dim=1)
        query, key = (_rotated(each, *self.rotation) for each in (query, key))
        joined = query.reshape(1, kv_heads, -1, shape.head_dim)
        return Parts(joined, self.text, (key, value), self.mask)

    def rows(self, outcome: torch.Tensor, width: int) -> torch.Tensor:
        """Joined heads as rows again: (W, heads * D)."""
        heads = outcome.reshape(self.shape.num_attention_heads, width, -1)
        return heads.transpose(0, 1).reshape(width, -1)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """What attention adds, by these heads, under one mask."""
        (qkv,), (out,) = self.weights["qkv"], self.weights["out"]
        parts = self.parts(linear(self.normed(x), qkv))
        key, value = (torch.cat(both, dim=2) for both in zip(parts.text, parts.tree, strict=True))
        mask = pad(self.mask, (self.text[0].shape[2], 0))
        attended = scaled_dot_product_attention(parts.query, key, value, attn_mask=mask)
        return linear(self.rows(attended, len(x)), out)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """What the MLP adds, by what is here of its inside."""
        (gate, up), (down,) = self.weights["gate_up"], self.weights["down"]
        normed = self.normed(x)
        return linear(silu(linear(normed, gate)) * linear(normed, up), down)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Divided by its root mean square; a norm's own weights are part of the next matrix."""
        return x * x.square().mean(-1, keepdim=True).add(self.eps).rsqrt()


class _Piece(NamedTuple):
    """The columns of a linear layer that one unit has."""

    matrices: tuple[torch.Tensor, ...]

    def task(self, x: torch.Tensor) -> Task | None:
        """Computes these columns (W, columns); None if there are none."""
        return (lambda: self._columns(x)) if len(self.matrices[0]) else None

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = (linear(x, matrix) for matrix in self.matrices)
        for other in others:  # The same columns of gate and up meet in one unit.
            first = silu(first) * other
        return first


def pieces(matrices: Tensors, share: float) -> tuple[_Piece, _Piece]:
    """The first columns for the first unit, and the others for the second one."""
    number = round(share * len(matrices[0]) / _STEP) * _STEP
    first, second = zip(*(matrix.tensor_split([number]) for matrix in matrices), strict=True)
    return _Piece(first), _Piece(second)


class Shared:
    """A layer whose work two units share; `shares` says how much of each kind the first one has."""

    def __init__(self, layer: Layer, units: Pair, shares: Mapping[str, float]) -> None:
        self._layer = layer
        self._units = units
        self._pieces = {kind: pieces(layer.weights[kind], shares[kind]) for kind in KINDS}
        # A unit that has every column of all layers has attention to itself, too.
        alone = units.first if set(shares.values()) == {1.0} else None
        self._attend = OnTwoUnits(units, alone)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives (W, hidden)."""
        parts = self._layer.parts(self._linear("qkv", self._layer.normed(x)))
        attended = self._layer.rows(self._attend(parts), len(x))
        x = x + self._linear("out", attended)
        return x + self._linear("down", self._linear("gate_up", self._layer.normed(x)))

    def tasks(self, kind: str, x: torch.Tensor) -> tuple[Task | None, Task | None]:
        """Both units' parts of a linear layer."""
        first, second = self._pieces[kind]
        return first.task(x), second.task(x)

    def _linear(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._units.run(*self.tasks(kind, x)), dim=-1)


class ByRows:
    """A layer that is split as Megatron-LM splits it: `share` of all heads and of the MLP's inside.

    Each unit has the first matrix of a pair by columns and the second one by rows. Both outcomes
    have all columns and are added.
    """

    def __init__(self, layer: Layer, units: Pair, share: float) -> None:
        shape, self._units = layer.shape, units
        heads, inner = shape.num_key_value_heads, shape.intermediate_size
        head = min(max(round(share * heads), 1), heads - 1)
        middle = min(max(round(share * inner / _STEP), 1) * _STEP, inner - _STEP)
        self._parts = (
            layer.part(slice(0, head), slice(0, middle)),
            layer.part(slice(head, heads), slice(middle, inner)),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives (W, hidden)."""
        first, second = self._parts
        x = x + sum(self._units.run(lambda: first.attend(x), lambda: second.attend(x)))
        y = x  # The parts of the MLP read it while the sum is made.
        return y + sum(self._units.run(lambda: first.mlp(y), lambda: second.mlp(y)))


def profiled(layer: Layer, units: Pair, width: int) -> dict[str, float]:
    """The share of each linear layer at which both units should end at the same time.

    A unit is slower while the other one works, since they share memory and its bus. Ghidorah
    therefore profiles each unit under this contention, and so does this.
    """
    shares = dict.fromkeys(KINDS, 0.5)
    for _ in range(_REFINEMENTS):
        shared = Shared(layer, units, shares)
        for kind in KINDS:
            x = torch.ones(width, layer.weights[kind][0].shape[1])
            first, second = shared.tasks(kind, x)
            if first is not None and second is not None:  # None: too slow to get a column.
                seconds = units.seconds_together(first, second, _ROUNDS)
                shares[kind] = _balanced(shares[kind], *seconds)
    return shares


def _balanced(share: float, first_seconds: float, second_seconds: float) -> float:
    """The share at which both would take equally long, at the speeds that they just had.

    >>> _balanced(0.5, 1.0, 3.0)
    0.75
    """
    first, second = share / first_seconds, (1 - share) / second_seconds
    return first / (first + second)


def _rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Heads (1, H, W, D) turned to their positions, as Llama does it."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
