"""One decoder layer shared by two unequal units, after Ghidorah's HCMP.

    python -m eval.hetero --columns 512 --width 16 --out hetero.json

Linear layers are split by columns between two units. Of attention, the first unit computes the
part that all nodes see and the second one the tree, and both are joined by their log-sum-exp. The
units are two CPU cores, the second one slowed by another process (--load), or with --units cuda a
CUDA device and the CPU beside it.

Compared are either unit alone, an even split, the split found by profiling each unit while the
other one rests, and the one found while the other one works too. All are run in turns; times are
medians. No model is needed: weights are random, in the size of a layer of --shape. Each outcome is
compared with that of plain masked attention and whole matrices. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval.errors import EvalError, exit_status
from eval.models.shapes import SHAPES, named_shape
from eval.options import described
from eval.report.tables import Table
from eval.units.layer import KINDS, Layer, Shared
from eval.units.shares import even, profiled
from eval.units.unit import Pair, busy_core, cores_for, two_units
from selfspec.machine.user_files import replace_text

__all__ = ["main"]

_WARM_UP = 2
# By rounding; a part that is missing or joined wrongly differs by far more.
_SAME = 1e-4
_ALONE = ("first unit alone", "second unit alone")
_LEAST = {"width": 1, "columns": 1, "rounds": 1, "load": 0}


class _Outcome(NamedTuple):
    """What one way to share the layer came to."""

    shares: Mapping[str, float]
    seconds: float
    difference: float  # the largest one from the plain layer, as a share of its largest value


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 where an outcome is wrong, 2 with one line where it can't be run."""
    options = _options(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    for name, least in _LEAST.items():
        if (value := getattr(options, name)) < least:
            raise EvalError(f"--{name} must be >= {least} (got {value})")
    if options.out and not options.out.parent.is_dir():
        raise EvalError(f"--out must be a file in a folder that exists (got {options.out})")
    torch.set_num_threads(1)
    shape = named_shape(options.shape)
    layer = Layer.random(shape, options.columns, options.width)
    core = min(cores_for(options.units)[1])
    slowed = busy_core(core, options.load) if options.units == "cpu" else nullcontext()
    with slowed, two_units(options.units) as units, torch.inference_mode():
        outcomes = _compared(layer, units, options.width, options.rounds)
    told = {"bench": "hetero", "shape": options.shape, "units": options.units}
    told |= {name: getattr(options, name) for name in _LEAST}
    told["ways"] = {name: _plain(outcome) for name, outcome in outcomes.items()}
    print(_table(outcomes).markdown(), end="\n\n")
    if options.out:
        replace_text(options.out, json.dumps(told, indent=2) + "\n")
    print(json.dumps(told))
    return int(any(outcome.difference > _SAME for outcome in outcomes.values()))


def _compared(layer: Layer, units: Pair, width: int, rounds: int) -> dict[str, _Outcome]:
    """Finds the splits, and runs all ways in turns."""
    print("profiling both units", file=sys.stderr, flush=True)
    shares = {
        _ALONE[0]: even(1.0),
        _ALONE[1]: even(0.0),
        "even split": even(),
        "profiled in isolation": profiled(layer, units, width, together=False),
        "profiled under contention": profiled(layer, units, width, together=True),
    }
    ways = {name: Shared(layer, units, each) for name, each in shares.items()}
    x = torch.randn(width, layer.shape.hidden_size, generator=torch.Generator().manual_seed(1))
    expected = layer.plain(x)
    times: dict[str, list[float]] = {name: [] for name in ways}
    differences = dict.fromkeys(ways, 0.0)
    for turn in range(_WARM_UP + rounds):
        for name in _rotated(list(ways), turn):
            start = perf_counter()
            found = ways[name](x)
            if turn >= _WARM_UP:
                times[name].append(perf_counter() - start)
            difference = float((found - expected).abs().max() / expected.abs().max())
            differences[name] = max(differences[name], difference)
    return {name: _Outcome(shares[name], median(times[name]), differences[name]) for name in ways}


def _rotated(names: list[str], by: int) -> list[str]:
    first = by % len(names)
    return names[first:] + names[:first]


def _table(outcomes: Mapping[str, _Outcome]) -> Table:
    best = min(outcomes[name].seconds for name in _ALONE)
    rows = [
        [
            name,
            *(f"{each.shares[kind]:.2f}" for kind in KINDS),
            f"{1000 * each.seconds:.1f}",
            f"{best / each.seconds:.2f}",
            f"{each.difference:.0e}",
        ]
        for name, each in outcomes.items()
    ]
    head = ["who has what", *KINDS, "ms a layer", "speed-up", "difference"]
    note = (
        "Columns of each linear layer that the first unit has; the speed-up is over the better "
        "unit alone; the difference is the largest one from the plain layer, as a share of its "
        "largest value."
    )
    return Table("One layer, two units", head, rows, note)


def _plain(outcome: _Outcome) -> dict[str, Any]:
    return {
        "shares": {kind: round(share, 3) for kind, share in outcome.shares.items()},
        "ms": round(1000 * outcome.seconds, 3),
        "difference": outcome.difference,
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described("hetero", __doc__)
    add = parser.add_argument
    add("--shape", default="1b", help=f"of the layer: {', '.join(SHAPES)}; default: 1b")
    add("--width", type=int, default=16, metavar="N", help="nodes of the tree; default: 16")
    add("--columns", type=int, default=512, metavar="N", help="committed tokens; default: 512")
    add("--units", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--load", type=int, default=1, metavar="N", help="processes on core two; default: 1")
    add("--rounds", type=int, default=15, metavar="N", help="default: 15")
    add("--out", type=Path, metavar="FILE.json", help="also write the JSON object there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
