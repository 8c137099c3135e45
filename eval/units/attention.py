"""One layer's attention over a tree: masked whole, in two parts, and entry by entry.

Four ways that give the same: stock's masked attention, which copies keys that heads share; ours
under one mask, without copies; ours in two parts, joined by their log-sum-exp; and the same with
the tree computed as a naive sparse product, one entry of the ancestors' mask after the other. They
run in turns over several layers' keys, so that no keys stay in a CPU's cache; times are medians.
Ghidorah's figure 10(b) compares its sparse product with a dense mask and with a naive product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from eval.models.shapes import GrownShape
from eval.report.table import Table
from eval.units.layer import tree_parents
from eval.units.ways import seconds_of
from selfspec.compat.kernels import attention_and_sums
from selfspec.papers.ghidorah import Parts, in_two_parts
from selfspec.run.layout import ancestors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUM_LAYERS = 4


class Case(NamedTuple):
    """What is timed: the sizes and the dtype."""

    columns: int
    width: int
    dtype: str


def timed_attention(
    shape: GrownShape, case: Case, device: torch.device, rounds: int
) -> dict[str, Any]:
    """The median milliseconds of each way, and how far the others are from stock's outcome."""
    with torch.inference_mode():
        layers = [_layer(shape, case, device, seed) for seed in range(_NUM_LAYERS)]
        return case._asdict() | _timed(layers, case.width, rounds)


def _layer(shape: GrownShape, case: Case, device: torch.device, seed: int) -> Parts:
    """Random queries of joined heads, keys and values, and the mask of a tree."""
    generator, dtype = torch.Generator().manual_seed(seed), DTYPES[case.dtype]
    kv_heads, dim = shape.num_key_value_heads, shape.head_dim
    group = shape.num_attention_heads // kv_heads

    def drawn(number: int) -> torch.Tensor:
        return torch.randn(1, kv_heads, number, dim, generator=generator).to(device, dtype)

    sees = torch.from_numpy(ancestors([tree_parents(case.width)], case.width).copy())
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
    query, key, value = map(drawn, (group * case.width, *2 * [case.columns + case.width]))
    rows = mask[None].repeat(1, 1, group, 1).to(device)
    return Parts(query, key, value, rows, scale=dim**-0.5)


def _timed(layers: Sequence[Parts], width: int, rounds: int) -> dict[str, float]:
    ways = _ways(layers[0], width)
    first, *others = [way(layers[0]).float() for way in ways.values()]
    difference = max(float((first - other).abs().max()) for other in others)
    waiting = {name: partial(_number, way) for name, way in ways.items()}
    seconds = seconds_of(waiting, layers, rounds)
    return {name: round(1000 * each, 4) for name, each in seconds.items()} | {
        "difference": difference
    }


def _ways(parts: Parts, width: int) -> dict[str, Callable[[Parts], torch.Tensor]]:
    """All ways, with the masks that every layer of a forward shares made beforehand."""
    group = parts.query.shape[2] // width
    whole_mask = pad(parts.mask, (parts.num_open, 0))
    one_mask = whole_mask[:, :, :width].contiguous()
    entries = (parts.mask[0, 0] == 0).nonzero().unbind(1)

    def stock(parts: Parts) -> torch.Tensor:
        heads = parts.query.reshape(1, -1, width, parts.query.shape[-1])
        key, value = (states.repeat_interleave(group, dim=1) for states in parts[1:3])
        attended = scaled_dot_product_attention(heads, key, value, one_mask, scale=parts.scale)
        return attended.reshape(parts.query.shape)

    def masked(parts: Parts) -> torch.Tensor:
        return scaled_dot_product_attention(*parts[:3], whole_mask, scale=parts.scale)

    def naive(parts: Parts) -> torch.Tensor:
        return _by_entries(parts, *entries)

    return {"stock": stock, "masked": masked, "two_parts": in_two_parts, "naive": naive}


def _by_entries(parts: Parts, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Two parts, where the tree's products are made for each entry of its mask by itself."""
    front = parts.num_open
    text, score = attention_and_sums(
        parts.query, parts.key[:, :, :front], parts.value[:, :, :front], parts.scale
    )
    queries = parts.query.float().index_select(2, rows)
    keys, values = (states[:, :, front:].float().index_select(2, columns) for states in parts[1:3])
    scores = (queries * keys).sum(-1) * parts.scale  # (B, H, entries)
    indices = rows.expand_as(scores)
    highest = score.scatter_reduce(2, indices, scores, "amax")
    weights = (scores - highest.gather(2, indices)).exp()
    text_weight = (score - highest).exp()
    total = text_weight.index_add(2, rows, weights)
    outcome = (text * text_weight[..., None]).index_add(2, rows, values * weights[..., None])
    return (outcome / total[..., None]).to(parts.query.dtype)


def _number(way: Callable[[Parts], torch.Tensor], parts: Parts) -> float:
    """Of what a way gives: reading it waits for the device."""
    return way(parts)[0, 0, 0, 0].item()


def attention_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each case, with the paper's figures below."""
    head = ["committed", "nodes", "dtype", "stock, ms", "masked, ms", "two parts, ms"]
    head += ["naive sparse, ms", "masked / two parts", "naive / two parts", "difference"]
    cells = [
        [
            *(str(row[name]) for name in Case._fields),
            *(f"{row[name]:.2f}" for name in ("stock", "masked", "two_parts", "naive")),
            *(f"{row[name] / row['two_parts']:.2f}" for name in ("masked", "naive")),
            f"{row['difference']:.0e}",
        ]
        for row in rows
    ]
    note = (
        "Ghidorah, figure 10(b), for its own sparse product on ARM: 1.90 times as fast as a dense "
        "mask, 3.49 times as fast as a naive sparse product."
    )
    return Table("Attention of one layer over a tree", head, cells, note)
