"""A decoder layer over the nodes of a tree, whose work two units share.

Linear layers are split by columns of their outcome. The first unit attends to the committed text,
which needs no mask, the second one to the tree, and to the end of the text if a boundary says so;
the parts are joined by their log-sum-exp. `ByRows` is the way of Megatron-LM: every second linear
layer is split by rows, and what both units give is added. A layer of random weights has no
positions: rotating them takes no time beside the products.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu

from eval.models.shapes import GrownShape
from eval.units.unit import Pair, Task, Unit
from selfspec.compat.kernels import attention_and_sums
from selfspec.run.layout import ancestors

KINDS = ("qkv", "out", "gate_up", "down")  # the linear layers; a share is found for each
_STEP = 16  # A share is rounded to so many columns.

Tensors = Sequence[torch.Tensor]


def tree_parents(width: int) -> list[int]:
    """The parents of a tree of so many nodes: each hangs on one of the three nodes before it.

    >>> tree_parents(8)
    [-1, 0, 1, 0, 2, 4, 4, 5]
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
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None  # cosines and sines, (W, D)
    eps: float = 1e-6  # of the norms

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
        mask = tree_mask(width).repeat(1, 1, heads // kv_heads, 1)
        return cls(shape, weights, (text[0], text[1]), mask)

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
                "qkv": (torch.cat([matrix[each] for matrix, each in rows]),),
                "out": (out[:, queries].contiguous(),),
                "gate_up": tuple(matrix[inner] for matrix in self.weights["gate_up"]),
                "down": (self.weights["down"][0][:, inner].contiguous(),),
            },
            text=(self.text[0][:, heads], self.text[1][:, heads]),
        )

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries joined by the head of keys that they share, keys and values: (1, H, N, D)."""
        shape, width = self.shape, len(qkv)
        heads = qkv.view(width, -1, shape.head_dim).transpose(0, 1)[None]
        kv_heads = shape.num_key_value_heads
        query, key, value = heads.split([shape.num_attention_heads, kv_heads, kv_heads], dim=1)
        if self.rotation is not None:
            query, key = (_rotated(each, *self.rotation) for each in (query, key))
        return query.reshape(1, kv_heads, -1, shape.head_dim), key, value

    def rows(self, outcome: torch.Tensor, width: int) -> torch.Tensor:
        """Joined heads as rows again: (W, heads * D)."""
        heads = outcome.reshape(self.shape.num_attention_heads, width, -1)
        return heads.transpose(0, 1).reshape(width, -1)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives (W, hidden), by masked attention and whole matrices."""
        x = x + self.attend(x)
        return x + self.mlp(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """What attention adds, by these heads."""
        (qkv,), (out,) = self.weights["qkv"], self.weights["out"]
        query, *tree = self.heads(linear(self.normed(x), qkv))
        key, value = (torch.cat(both, dim=2) for both in zip(self.text, tree, strict=True))
        mask = pad(self.mask, (self.text[0].shape[2], 0))
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask)
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
    """A layer whose work two units share; `shares` says how much of each kind the first one has.

    The second unit attends to the tree and to the text from the column `boundary` on; None: the
    first one attends to all of the text.
    """

    def __init__(
        self, layer: Layer, units: Pair, shares: Mapping[str, float], boundary: int | None = None
    ) -> None:
        self._layer = layer
        self._units = units
        self._pieces = {kind: pieces(layer.weights[kind], units, shares[kind]) for kind in KINDS}
        # A unit that has no column of any layer takes no part in attention either.
        self._alone = {1.0: units.first, 0.0: units.second}.get(sum(shares.values()) / len(KINDS))
        self._dense_device = (self._alone or units.first).device
        self._text = [part[:, :, :boundary].to(self._dense_device) for part in layer.text]
        rest = [] if boundary is None else [part[:, :, boundary:] for part in layer.text]
        self._rest = rest if rest and rest[0].shape[2] else []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives (W, hidden)."""
        qkv = self._linear("qkv", self._layer.normed(x))
        x = x + self._linear("out", self._layer.rows(self.attended(qkv), len(x)))
        return x + self._linear("down", self._linear("gate_up", self._layer.normed(x)))

    def tasks(self, kind: str, x: torch.Tensor) -> tuple[Task | None, Task | None]:
        """Both units' parts of a linear layer."""
        first, second = self._pieces[kind]
        return first.task(x), second.task(x)

    def _linear(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._units.run(*self.tasks(kind, x)), dim=-1)

    def attended(self, qkv: torch.Tensor) -> torch.Tensor:
        """Attention alone, from what `qkv` gave: joined heads."""
        query, key, value = self._layer.heads(qkv)
        scale = query.shape[-1] ** -0.5

        def dense() -> Tensors:
            found = attention_and_sums(query.to(self._dense_device), *self._text, scale)
            return [tensor.cpu() for tensor in found]

        def sparse() -> Tensors:
            scores = query @ key.mT * scale + self._layer.mask
            tree = scores.softmax(-1) @ value, scores.logsumexp(-1)
            return (
                _joined(attention_and_sums(query, *self._rest, scale), tree) if self._rest else tree
            )

        def both() -> Tensors:
            return _joined(dense(), sparse())

        if self._alone is None:
            return _joined(*self._units.run(dense, sparse))[0]
        first, second = (both if unit is self._alone else None for unit in self._units)
        ((outcome, _),) = self._units.run(first, second)
        return outcome  # type: ignore[no-any-return]


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


def tree_mask(width: int) -> torch.Tensor:
    """Additive (1, 1, W, W): a node of `tree_parents` sees itself and those above it."""
    sees = torch.from_numpy(ancestors([tree_parents(width)], width).copy())
    return torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None]


def _rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Heads (1, H, W, D) turned to their positions, as Llama does it."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def _joined(first: Tensors, second: Tensors) -> Tensors:
    """Both parts of attention, weighted by their log-sum-exp, and the log-sum-exp of both."""
    weight = torch.sigmoid(first[1] - second[1])[..., None]
    return torch.lerp(second[0], first[0], weight), torch.logaddexp(first[1], second[1])


def pieces(matrices: Tensors, units: Pair, share: float) -> tuple[_Piece, _Piece]:
    """The first columns for the first unit, and the others for the second one."""
    number = round(share * len(matrices[0]) / _STEP) * _STEP
    first, second = zip(*(matrix.tensor_split([number]) for matrix in matrices), strict=True)
    return _Piece.on(units.first, first), _Piece.on(units.second, second)
