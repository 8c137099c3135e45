"""Speculative decoding in an edge network, simulated: batches, a pipeline, shares of the band.

    python -m eval.edge_network --seed 0 --out edge.html

The setting is that of "Efficient LLM Inference over Heterogeneous Edge Networks with Speculative
Decoding": users send prompts to a small base station, which drafts for all of them, and a large one
verifies. Nothing is run, and no model is needed: all times come from a latency that is linear in
rows and in floating-point operations. The paper's coefficients are not known here, so those of
this command are assumed, and it prints them. --seed draws the users; every figure is a mean over
--draws of them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from eval.edge.network import Network, new_users
from eval.edge.schemes import DESCRIPTIONS, PLANNED, Served, serve
from eval.errors import EvalError, exit_status
from eval.options import described
from eval.report.charts import line_chart
from eval.report.html import document
from eval.report.tables import Table
from selfspec.machine.user_files import replace_text

__all__ = ["Figures", "Sweep", "main", "measured"]

# What the paper says its plan saves, in per cent, in settings of its own.
PAPER = {
    "no pipeline": "31.6 and 30.7",
    "largest batch": "21.4",
    "heuristic": "19.6 and 20.5",
    "uniform bandwidth": "44.9, 29.3 and 25.2",
}
_COLORS = dict(
    zip(
        DESCRIPTIONS,
        ("#d55e00", "#57606a", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
        strict=True,
    )
)


class Sweep(NamedTuple):
    """One thing that changes from network to network, while all others stay."""

    field: str  # Of `Network`.
    title: str
    values: tuple[float, ...]


class Figures(NamedTuple):
    """Mean seconds of a scheme, of all of it and of inference alone."""

    seconds: float
    inference: float


SWEEPS = (
    Sweep("num_users", "users", (8, 16, 24, 32)),
    Sweep("max_tokens", "tokens that fit into a batch", (2048, 4096, 8192, 16_384)),
    Sweep("bandwidth_mhz", "bandwidth, MHz", (5, 10, 20, 40)),
    Sweep("fixed_ms", "fixed part of each forward, ms", (0, 1, 5, 17)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates all networks, and prints tables and the JSON line."""
    options = _options(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.draws < 1:
        raise EvalError(f"--draws must be >= 1 (got {options.draws})")
    if options.out and not options.out.parent.is_dir():
        raise EvalError(f"--out must be a file in a folder that exists (got {options.out})")
    base = Network()
    seeds = range(options.seed, options.seed + options.draws)
    found = {sweep: _swept(sweep, base, seeds) for sweep in SWEEPS}
    middle = measured(base, seeds)
    tables = [_reductions(middle), *(_table(*each) for each in found.items()), _assumed(base)]
    print("\n\n".join(table.markdown() for table in tables))
    if options.out:
        replace_text(options.out, _page(tables, found))
        print(f"\npage: {options.out}")
    print(json.dumps(_told(options, base, middle, found)))
    return 0


def _swept(sweep: Sweep, base: Network, seeds: Iterable[int]) -> dict[float, dict[str, Figures]]:
    found = {}
    for value in sweep.values:
        print(f"simulating: {sweep.title} {value:g}", file=sys.stderr, flush=True)
        changed: dict[str, Any] = {sweep.field: value}
        found[value] = measured(replace(base, **changed), seeds)
    return found


def measured(network: Network, seeds: Iterable[int]) -> dict[str, Figures]:
    """The mean over the users of some seeds, for each scheme."""
    draws = [serve(network, new_users(network, seed)) for seed in seeds]
    return {name: _mean([draw[name] for draw in draws]) for name in DESCRIPTIONS}


def _mean(served: Sequence[Served]) -> Figures:
    number = len(served)
    return Figures(
        sum(each.seconds for each in served) / number,
        sum(each.inference for each in served) / number,
    )


def _reductions(figures: dict[str, Figures]) -> Table:
    """What the plan saves against each other scheme, with the paper's figures beside it."""
    planned = figures[PLANNED]
    rows = [
        [
            name,
            DESCRIPTIONS[name],
            f"{each.inference:.2f}",
            f"{each.seconds:.2f}",
            _saved(planned.inference, each.inference),
            _saved(planned.seconds, each.seconds),
            PAPER.get(name, "–"),
        ]
        for name, each in figures.items()
    ]
    head = ["scheme", "what it is", "inference, s", "in all, s"]
    head += ["the plan saves, of inference, %", "of all, %", "in the paper, %"]
    note = (
        "Inference begins when all prompts have arrived. The paper's figures are of its own "
        "settings, which differ from this one, so the directions can be compared, the sizes can't."
    )
    return Table("What the plan saves", head, rows, note)


def _saved(planned: float, other: float) -> str:
    return f"{100 * (1 - planned / other):.1f}"


def _table(sweep: Sweep, found: dict[float, dict[str, Figures]]) -> Table:
    rows = [
        [name, *(f"{figures[name].seconds:.2f}" for figures in found.values())]
        for name in DESCRIPTIONS
    ]
    note = "Seconds from the first bit of a prompt to the last token of an answer."
    head = ["scheme", *(f"{value:g}" for value in found)]
    return Table(f"By {sweep.title}", head, rows, note)


def _assumed(network: Network) -> Table:
    """All coefficients, which are assumed."""
    rows = [[name.replace("_", " "), f"{value}"] for name, value in asdict(network).items()]
    return Table("What is assumed", ["coefficient", "value"], rows)


def _page(tables: Sequence[Table], found: dict[Sweep, dict[float, dict[str, Figures]]]) -> str:
    first, *others = [table.html() for table in tables]
    drawn = []
    for sweep, points in found.items():
        lines = {
            name: {value: figures[name].seconds for value, figures in points.items()}
            for name in DESCRIPTIONS
        }
        label = f"Seconds by {sweep.title}"
        chart = line_chart(lines, _COLORS, label=label, unit=" s", x_title=sweep.title)
        drawn.append(f"<h2>{label}</h2>{chart}")
    return document("An edge network, simulated", "".join([first, *drawn, *others]))


def _told(
    options: argparse.Namespace,
    network: Network,
    middle: dict[str, Figures],
    found: dict[Sweep, dict[float, dict[str, Figures]]],
) -> dict[str, Any]:
    return {
        "bench": "edge_network",
        "seed": options.seed,
        "draws": options.draws,
        "assumed": asdict(network),
        "schemes": _plain(middle),
        "sweeps": {
            sweep.field: {f"{value:g}": _plain(figures) for value, figures in points.items()}
            for sweep, points in found.items()
        },
    }


def _plain(figures: dict[str, Figures]) -> dict[str, dict[str, float]]:
    return {
        name: {key: round(value, 4) for key, value in each._asdict().items()}
        for name, each in figures.items()
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described("edge_network", __doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the first draw of users; default: 0")
    add("--draws", type=int, default=3, metavar="N", help="of users, for the mean; default: 3")
    add("--out", type=Path, metavar="FILE.html", help="a page with the tables and pictures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
