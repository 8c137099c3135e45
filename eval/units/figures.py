"""Ghidorah's figures 9 and 10(a): a whole model by the width of its tree, attention by its context.

Figure 9 compares sequential decoding, a tree on one unit, a tree on two units that are split by
rows, and one on two units that are split by columns. Figure 10(a) compares attention whose parts
are one for each unit with attention whose boundary was found by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch

from eval.models.shapes import GrownShape
from eval.report.table import Table
from eval.units.layer import Layer, Shared
from eval.units.model import Read, SharedModel
from eval.units.shares import even, profiled
from eval.units.unit import Pair
from eval.units.ways import seconds_of

# Tokens a step by the width of the check: Ghidorah's table I, MT-bench.
REPORTED = {1: 1.0, 2: 1.72, 4: 2.28, 8: 2.59, 16: 2.93, 32: 3.19, 64: 3.34}
_EIGHTHS = range(4, 9)
_WAYS = ("one unit", "by rows", "by columns")


def timed_widths(
    model: Any, prompt_ids: torch.Tensor, units: Pair, widths: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each width, that of sequential decoding first: milliseconds of a forward."""
    for width in (1, *widths):
        read = Read.of(model, prompt_ids, width)
        ways = _ways(read, units, width)
        largest = read.logits.abs().max()
        wrong = max(float((way(read.nodes) - read.logits).abs().max()) for way in ways.values())
        seconds = seconds_of(ways, [read.nodes], rounds)
        times = {name: round(1000 * each, 2) for name, each in seconds.items()}
        yield {"width": width, "ms": times, "difference": wrong / float(largest)}


def _alone(read: Read, units: Pair) -> SharedModel:
    return SharedModel.by_columns(read, units, even(1.0))


def _ways(read: Read, units: Pair, width: int) -> dict[str, Callable[..., torch.Tensor]]:
    """The split by columns is found under contention; that by rows by each unit's own time."""
    if width == 1:
        return {_WAYS[0]: _alone(read, units)}
    layer = read.layers[len(read.layers) // 2]
    share = mean(profiled(layer, units, width, together=False).values())
    shares = profiled(layer, units, width, together=True)
    made: tuple[Callable[..., torch.Tensor], ...] = (
        _alone(read, units),
        SharedModel.by_rows(read, units, share),
        SharedModel.by_columns(read, units, shares),
    )
    return dict(zip(_WAYS, made, strict=True))


def widths_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds, and with the paper's tokens a step the speed-up over sequential decoding."""
    plain = rows[0]["ms"][_WAYS[0]]
    cells = [
        [str(row["width"]), f"{(tokens := REPORTED[row['width']]):.2f}"]
        + [f"{row['ms'][way]:.0f}" if way in row["ms"] else "–" for way in _WAYS]
        + [f"{tokens * plain / row['ms'][way]:.2f}" if way in row["ms"] else "–" for way in _WAYS]
        + [f"{row['difference']:.0e}"]
        for row in rows
        if row["width"] in REPORTED
    ]
    head = ["nodes", "tokens, table I", *(f"{way}, ms" for way in _WAYS)]
    head += [*(f"{way}, speed-up" for way in _WAYS), "difference"]
    note = (
        "A whole model. The speed-up is over one node on the first unit, with the tokens a step of "
        "Ghidorah's table I. The difference is that of the logits from the model's own."
    )
    return Table("Widths on one unit and on two", head, cells, note)


def timed_boundaries(
    shape: GrownShape, units: Pair, columns: int, width: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Attention alone: milliseconds with all of the text on the first unit, and with eighths."""
    layer = Layer.random(shape, columns, width)
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    qkv = torch.randn(width, heads * shape.head_dim, generator=torch.Generator().manual_seed(1))
    bounds = {f"{eighth}/8": columns * eighth // 8 for eighth in _EIGHTHS}
    shared = {name: Shared(layer, units, even(), bound) for name, bound in bounds.items()}
    ways: dict[str, Callable[..., torch.Tensor]] = {
        name: partial(each.attended) for name, each in shared.items()
    }
    ways["alone"] = Shared(layer, units, even(1.0)).attended
    expected = ways["alone"](qkv)
    wrong = max(float((way(qkv) - expected).abs().max()) for way in ways.values())
    times = {n: round(1000 * each, 3) for n, each in seconds_of(ways, [qkv], rounds).items()}
    best = min(bounds, key=times.__getitem__)
    yield {
        "columns": columns,
        "width": width,
        "alone": times["alone"],
        "static": times["8/8"],
        "dynamic": times[best],
        "boundary": best,
        "difference": wrong / float(expected.abs().max()),
    }


def boundary_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What `timed_boundaries` found, for any number of contexts."""
    cells = [
        [str(row["columns"]), str(row["width"])]
        + [f"{row[way]:.1f}" for way in ("alone", "static", "dynamic")]
        + [row["boundary"], f"{row['static'] / row['dynamic']:.2f}", f"{row['difference']:.0e}"]
        for row in rows
    ]
    head = ["committed", "nodes", "first unit alone, ms", "static, ms", "dynamic, ms"]
    head += ["first unit's text", "static / dynamic", "difference"]
    note = (
        "One layer's attention. Static: the first unit has the text, the second one the tree. "
        "Dynamic: the second one also has the end of the text, by the best of five boundaries."
    )
    return Table("Attention on two units", head, cells, note)
