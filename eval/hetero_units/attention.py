"""One layer's attention over a tree: on one unit under one mask or in two parts, and on two units.

In two parts, every node sees the whole committed text, so this part needs no mask, and torch's fast
kernel computes it for all nodes at once. The tree has few keys, which a small product asks under
the mask of ancestors. The two are joined by their log-sum-exp.

Ghidorah's figure 10(b) compares its sparse product with a dense mask and with a naive product; its
figure 10(a) compares attention whose parts are one for each unit with attention whose boundary was
found by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from eval.hetero_units.unit import Pair, Unit, seconds_of
from eval.models.shapes import GrownShape
from eval.report.table import Table
from selfspec.forward.layout import ancestors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUM_LAYERS = 4  # So that no keys stay in a CPU's cache.
_EIGHTHS = range(4, 9)


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


class Whole(NamedTuple):
    """The same keys and values in parts, and side by side."""

    parts: Parts
    text_and_tree: Tensors


def random_parts(
    shape: GrownShape, columns: int, mask: torch.Tensor, *where: Any, seed: int = 0
) -> Whole:
    """Random queries, keys and values, on a device and in a dtype."""
    generator, heads = torch.Generator().manual_seed(seed), shape.num_key_value_heads
    group, width = shape.num_attention_heads // heads, mask.shape[-1]

    def drawn(number: int) -> torch.Tensor:
        return torch.randn(1, heads, number, shape.head_dim, generator=generator).to(*where)

    whole = [drawn(columns + width) for _ in range(2)]
    text, tree = zip(*(states.split([columns, width], dim=2) for states in whole), strict=True)
    rows = mask.repeat(1, 1, group, 1).to(*where)
    return Whole(Parts(drawn(group * width), text, tree, rows), whole)


def tree_mask(parents: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Additive (1, 1, W, W): a node sees itself and those above it."""
    sees = torch.from_numpy(ancestors([parents], len(parents)).copy())
    return torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)[None]


def joined(first: Tensors, second: Tensors) -> Tensors:
    """Both parts of attention, weighted by their log-sum-exp, and the log-sum-exp of both."""
    weight = torch.sigmoid(first[1] - second[1])[..., None]
    return torch.lerp(second[0], first[0], weight), torch.logaddexp(first[1], second[1])


def _of_tree(parts: Parts) -> Tensors:
    """The tree's part. In half precision a rounded score would be off by more than kernels are."""
    scores = parts.query.float() @ parts.tree[0].float().mT * parts.scale + parts.mask
    return scores.softmax(-1) @ parts.tree[1].float(), scores.logsumexp(-1)


def in_two_parts(parts: Parts) -> torch.Tensor:
    """The outcome (B, H, N, D); equal to that of masked attention, except for rounding."""
    text, sums = attention_and_sums(parts.query, parts.text, parts.scale)
    return joined((text.float(), sums), _of_tree(parts))[0].to(parts.query.dtype)


def attention_and_sums(
    query: torch.Tensor, states: Tensors, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask (B, H, N, D), and the log-sum-exp of its scores (B, H, N).

    torch has no public call that gives both on every device.
    """
    aten, (key, value) = torch.ops.aten, states
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


class OnTwoUnits:
    """The first unit has the text up to `boundary`, the second one the tree and the text's end.

    None: all of the text. A unit that is `alone` does both parts.
    """

    def __init__(
        self, text: Tensors, units: Pair, boundary: int | None = None, alone: Unit | None = None
    ) -> None:
        self._units, self._alone = units, alone
        self._device = (alone or units.first).device
        self._front = [each[:, :, :boundary].to(self._device) for each in text]
        end = [] if boundary is None else [each[:, :, boundary:] for each in text]
        self._end = end if end and end[0].shape[2] else []

    def __call__(self, parts: Parts) -> torch.Tensor:
        """The outcome (1, H, N, D), on the CPU."""
        if self._alone is None:
            both = self._units.run(lambda: self._dense(parts), lambda: self._sparse(parts))
            return joined(*both)[0]
        first, second = (
            (lambda: joined(self._dense(parts), self._sparse(parts)))
            if unit is self._alone
            else None
            for unit in self._units
        )
        ((outcome, _),) = self._units.run(first, second)
        return outcome

    def _dense(self, parts: Parts) -> Tensors:
        found = attention_and_sums(parts.query.to(self._device), self._front, parts.scale)
        return [tensor.cpu() for tensor in found]

    def _sparse(self, parts: Parts) -> Tensors:
        tree = _of_tree(parts)
        if not self._end:
            return tree
        return joined(attention_and_sums(parts.query, self._end, parts.scale), tree)


def timed_boundaries(
    shape: GrownShape, units: Pair, parents: list[int], columns: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds with all of the text on the first unit, and with eighths of it."""
    parts, _ = random_parts(shape, columns, tree_mask(parents))
    ways: dict[str, Callable[..., torch.Tensor]] = {
        f"{n}/8": OnTwoUnits(parts.text, units, columns * n // 8) for n in _EIGHTHS
    }
    shared = list(ways)
    ways["alone"] = OnTwoUnits(parts.text, units, alone=units.first)
    expected = ways["alone"](parts)
    wrong = max(float((way(parts) - expected).abs().max()) for way in ways.values())
    times = {n: round(1000 * each, 3) for n, each in seconds_of(ways, [parts], rounds).items()}
    best = min(shared, key=times.__getitem__)
    return {
        "columns": columns,
        "width": len(parents),
        "alone": times["alone"],
        "static": times["8/8"],
        "dynamic": times[best],
        "boundary": best,
        "static_over_dynamic": times["8/8"] / times[best],
        "difference": wrong / float(expected.abs().max()),
    }


_BOUNDARY = {
    "committed": "{columns}",
    "nodes": "{width}",
    "first unit alone, ms": "{alone:.1f}",
    "static, ms": "{static:.1f}",
    "dynamic, ms": "{dynamic:.1f}",
    "first unit's text": "{boundary}",
    "static / dynamic": "{static_over_dynamic:.2f}",
    "difference": "{difference:.0e}",
}


def boundary_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What `timed_boundaries` found, for any number of contexts."""
    note = (
        "One layer's attention. Static: the first unit has the text, the second one the tree. "
        "Dynamic: the second one also has the end of the text, by the best of five boundaries."
    )
    return Table.of("Attention on two units", _BOUNDARY, rows, note)


def timed_attention(
    shape: GrownShape, parents: list[int], columns: int, dtype: str, device: Any, rounds: int
) -> dict[str, Any]:
    """The median milliseconds of each way, and how far the others are from stock's outcome.

    Stock's masked attention copies keys that heads share; ours under one mask does not; ours in two
    parts; and the same with the tree as a naive sparse product, one entry of the mask after the
    other.
    """
    mask, where = tree_mask(parents, DTYPES[dtype]), (device, DTYPES[dtype])
    layers = [random_parts(shape, columns, mask, *where, seed=n) for n in range(_NUM_LAYERS)]
    whole_mask = pad(layers[0].parts.mask, (columns, 0))  # As every layer of a forward shares it.
    entries = (layers[0].parts.mask[0, 0] == 0).nonzero().unbind(1)
    ways: dict[str, Callable[[Whole], torch.Tensor]] = {
        "stock": partial(_stock, mask=whole_mask[:, :, : len(parents)].contiguous()),
        "masked": partial(_masked, mask=whole_mask),
        "two_parts": lambda layer: in_two_parts(layer.parts),
        "naive": partial(_by_entries, rows=entries[0], columns=entries[1]),
    }
    first, *others = [way(layers[0]).float() for way in ways.values()]
    waiting = {name: partial(_number, way) for name, way in ways.items()}
    times = {n: round(1000 * each, 4) for n, each in seconds_of(waiting, layers, rounds).items()}
    return {
        **{"columns": columns, "width": len(parents), "dtype": dtype, **times},
        "masked_over_two": times["masked"] / times["two_parts"],
        "naive_over_two": times["naive"] / times["two_parts"],
        "difference": max(float((first - other).abs().max()) for other in others),
    }


def _stock(layer: Whole, mask: torch.Tensor) -> torch.Tensor:
    parts, states = layer
    width = mask.shape[2]
    heads = parts.query.reshape(1, -1, width, parts.query.shape[-1])
    group = heads.shape[1] // parts.query.shape[1]
    key, value = (state.repeat_interleave(group, dim=1) for state in states)
    attended = scaled_dot_product_attention(heads, key, value, mask, scale=parts.scale)
    return attended.reshape(parts.query.shape)


def _masked(layer: Whole, mask: torch.Tensor) -> torch.Tensor:
    parts, (key, value) = layer
    return scaled_dot_product_attention(parts.query, key, value, mask, scale=parts.scale)


def _by_entries(layer: Whole, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Two parts, where the tree's products are made for each entry of its mask by itself."""
    parts, _ = layer
    text, score = attention_and_sums(parts.query, parts.text, parts.scale)
    queries = parts.query.float().index_select(2, rows)
    keys, values = (states.float().index_select(2, columns) for states in parts.tree)
    scores = (queries * keys).sum(-1) * parts.scale  # (B, H, entries)
    indices = rows.expand_as(scores)
    highest = score.scatter_reduce(2, indices, scores, "amax")
    weights = (scores - highest.gather(2, indices)).exp()
    text_weight = (score - highest).exp()
    total = text_weight.index_add(2, rows, weights)
    outcome = (text * text_weight[..., None]).index_add(2, rows, values * weights[..., None])
    return (outcome / total[..., None]).to(parts.query.dtype)


def _number(way: Callable[[Whole], torch.Tensor], layer: Whole) -> float:
    """Of what a way gives: reading it waits for the device."""
    return way(layer)[0, 0, 0, 0].item()


_ATTENTION = {
    "committed": "{columns}",
    "nodes": "{width}",
    "dtype": "{dtype}",
    "stock, ms": "{stock:.2f}",
    "masked, ms": "{masked:.2f}",
    "two parts, ms": "{two_parts:.2f}",
    "naive sparse, ms": "{naive:.2f}",
    "masked / two parts": "{masked_over_two:.2f}",
    "naive / two parts": "{naive_over_two:.2f}",
    "difference": "{difference:.0e}",
}


def attention_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each case, with the paper's figures below."""
    note = (
        "Ghidorah, figure 10(b), for its own sparse product on ARM: 1.90 times as fast as a dense "
        "mask, 3.49 times as fast as a naive sparse product."
    )
    return Table.of("Attention of one layer over a tree", _ATTENTION, rows, note)
