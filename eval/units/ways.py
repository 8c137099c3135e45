"""The ways to share a layer between two units, timed in turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from eval.models.shapes import GrownShape
from eval.report.table import Table
from eval.units.layer import KINDS, Layer, Shared
from eval.units.shares import even, profiled
from eval.units.unit import Pair

_WARM_UP = 2
_ALONE = ("first unit alone", "second unit alone")
_THREADS = "torch's own threads"

_Way = Callable[[torch.Tensor], torch.Tensor]


def timed_ways(
    shape: GrownShape, units: Pair, columns: int, width: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each way: its shares, its time, and how far its outcome is from the plain layer's.

    The speed-up is over the better unit alone, and the difference the largest one, as a share of
    the largest value.
    """
    layer = Layer.random(shape, columns, width)
    shares = {
        _ALONE[0]: even(1.0),
        _ALONE[1]: even(0.0),
        "even split": even(),
        "profiled in isolation": profiled(layer, units, width, together=False),
        "profiled under contention": profiled(layer, units, width, together=True),
    }
    ways: dict[str, _Way] = {name: Shared(layer, units, each) for name, each in shares.items()}
    ways[_THREADS] = partial(_by_threads, layer)
    shares[_THREADS] = {}
    x = torch.randn(width, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    expected = layer.plain(x)
    differences = {
        name: float((way(x) - expected).abs().max() / expected.abs().max())
        for name, way in ways.items()
    }
    seconds = seconds_of(ways, [x], rounds)
    best = min(seconds[name] for name in _ALONE)
    return [
        {
            "columns": columns,
            "width": width,
            "way": name,
            "shares": {kind: round(share, 3) for kind, share in shares[name].items()},
            "ms": round(1000 * seconds[name], 3),
            "speed_up": round(best / seconds[name], 3),
            "difference": differences[name],
        }
        for name in ways
    ]


def _by_threads(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """The plain layer on all cores: torch gives each of its threads an equal part."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        return layer.plain(x)
    finally:
        torch.set_num_threads(1)


def seconds_of(
    ways: Mapping[str, Callable[[Any], object]], inputs: Sequence[Any], rounds: int
) -> dict[str, float]:
    """The median time of each way; which one begins changes from round to round, as the input."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(_WARM_UP + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = perf_counter()
            ways[name](inputs[turn % len(inputs)])
            if turn >= _WARM_UP:
                times[name].append(perf_counter() - start)
    return {name: median(each) for name, each in times.items()}


def ways_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What `timed_ways` found, for any number of sizes."""
    cells = [
        [
            row["way"],
            *(str(row[name]) for name in ("columns", "width")),
            *(f"{row['shares'][kind]:.2f}" if row["shares"] else "–" for kind in KINDS),
            f"{row['ms']:.1f}",
            f"{row['speed_up']:.2f}",
            f"{row['difference']:.0e}",
        ]
        for row in rows
    ]
    head = ["way", "committed", "nodes", *KINDS, "ms a layer", "speed-up", "difference"]
    note = (
        "Behind the nodes, how much of each linear layer the first unit has. The speed-up is over "
        "the better unit alone; the difference is the largest one from the plain layer, as a share "
        "of its largest value."
    )
    return Table("One layer, two units", head, cells, note)
