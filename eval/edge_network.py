"""The simulations of "Efficient LLM Inference over Heterogeneous Edge Networks …", figures 6 to 9.

    python -m eval edge_network --pictures FOLDER

Users send prompts to a small base station, which drafts for all of them, and a large one verifies.
Nothing is run, and no model is needed: all times come from the paper's equations. Some of what they
need can't be read in our copy of the paper; the command prints what is assumed in its place. Each
figure is made for forwards that read their weights, and for such that do not. --seed draws the
users; every point is a mean over --draws of them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from eval.edge_network_model.network import ASSUMED, PAIRS, Network, new_users
from eval.edge_network_model.schemes import DESCRIPTIONS, PLANNED, UNIFORM, serve
from eval.options import check_at_least
from eval.report.pages import write_pictures
from eval.report.pictures import Picture, lines
from eval.report.table import Table
from eval.runs.environment import tell

_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#57606a", "#56b4e9")
_SERVING = (PLANNED, "no pipeline", "no batching", "fixed length", "no speculation")
_BATCHING = (PLANNED, "static batches", "largest batch", "heuristic")
_LENGTHS = (256, 512, 768, 1024, 1280, 1536, 1792)

_X_TITLES = {
    "acceptance": "chance that a draft is accepted",
    "bandwidth_mhz": "bandwidth (MHz)",
    "input_tokens": "longest prompt (tokens)",
    "output_tokens": "longest answer (tokens)",
}

Lines = dict[str, dict[float, float]]  # By name, then by what changes.


class Figure(NamedTuple):
    """What changes from point to point, and which schemes are drawn for which other settings."""

    name: str
    field: str  # Of `Network`.
    values: tuple[float, ...]
    schemes: tuple[str, ...]
    others: dict[str, dict[str, Any]] = {"": {}}  # noqa: RUF012  Each is a group of lines.

    def lines(self, base: Network, seeds: range) -> Lines:
        """Mean seconds, from the first bit of a prompt to the last token of an answer."""
        lines: Lines = {}
        for other, changes in self.others.items():
            for value in self.values:
                network = replace(base, **changes, **self._changed(value))
                draws = [serve(network, new_users(network, seed)) for seed in seeds]
                for scheme in self.schemes:
                    line = lines.setdefault(f"{scheme}{other}", {})
                    line[value] = mean(draw[scheme].seconds for draw in draws)
        return lines

    def _changed(self, value: float) -> dict[str, Any]:
        if self.field.endswith("_tokens"):  # The longest; the shortest stays.
            return {self.field: (100, int(value))}
        return {self.field: int(value) if self.field == "num_users" else value}


_PAIRS = {f", {pair}": {"pair": pair} for pair in PAIRS}
FIGURES = (
    Figure("6", "acceptance", (0.5, 0.6, 0.7, 0.8, 0.9), (PLANNED, "no speculation"), _PAIRS),
    Figure("7a", "num_users", (10, 30, 50, 70, 90), _SERVING),
    Figure("7b", "input_tokens", _LENGTHS, _SERVING),
    Figure("7c", "output_tokens", _LENGTHS, _SERVING),
    Figure("8a", "num_users", (10, 30, 50, 70, 90), _BATCHING),
    Figure("8b", "input_tokens", _LENGTHS, _BATCHING),
    Figure("8c", "output_tokens", _LENGTHS, _BATCHING),
    *(
        Figure(f"9{letter}", "bandwidth_mhz", (10, 20, 30, 40), (PLANNED, UNIFORM), {
            f", {users} users": {"pair": pair, "num_users": users} for users in (20, 40)
        })
        for letter, pair in zip("abc", PAIRS, strict=True)
    ),
)  # fmt: skip


class Claim(NamedTuple):
    """A reduction that the paper names, in per cent, and the points of a figure it belongs to."""

    figure: str
    scheme: str
    at: float | None  # None: the point can't be read, so the best one counts.
    what: str
    paper: float


CLAIMS = (
    Claim("7b", "no pipeline", None, "over prompts' lengths", 31.6),
    Claim("7c", "no pipeline", 1792, "answers of up to 1,792 tokens", 30.7),
    Claim("8a", "largest batch", 90, "90 users", 21.4),
    Claim("8b", "heuristic", 1792, "prompts of up to 1,792 tokens", 19.6),
    Claim("8c", "heuristic", 1024, "answers of up to 1,024 tokens", 20.5),
    *(
        Claim(figure, UNIFORM, None, f"{pair}, over bandwidths", paper)
        for figure, pair, paper in zip(("9a", "9b", "9c"), PAIRS, (44.9, 29.3, 25.2), strict=True)
    ),
)
_CASES = {"weights are read": True, "weights cost nothing": False}


def run(options: argparse.Namespace) -> int:
    """Simulates all figures, and prints tables and the JSON line."""
    check_at_least(options, 1, "draws")
    seeds = range(options.seed, options.seed + options.draws)
    found: dict[str, dict[str, Lines]] = {}
    for case, reads in _CASES.items():
        base = Network(reads_weights=reads)
        for figure in FIGURES:
            print(f"simulating: figure {figure.name}, {case}", file=sys.stderr, flush=True)
            found.setdefault(case, {})[figure.name] = figure.lines(base, seeds)
    tables = [_claims(found), _even_stages(seeds), _assumed()]
    print("\n\n".join(table.markdown() for table in tables))
    if options.pictures:
        drawn = (picture for case in found for picture in _drawn(case, found[case]))
        named = [picture._replace(title=f"edge {picture.title}") for picture in drawn]
        write_pictures(options.pictures, named)
        print(f"\npictures: {options.pictures}")
    return tell("edge_network", options, **_numbers(found))


def _claims(found: dict[str, dict[str, Lines]]) -> Table:
    rows = [
        [f"{claim.scheme}: {claim.what}", claim.figure, f"{claim.paper:.1f}"]
        + [f"{_saved(claim, lines[claim.figure]):.1f}" for lines in found.values()]
        for claim in CLAIMS
    ]
    head = ["the plan against", "figure", "paper, %", *(f"{case}, %" for case in found)]
    note = (
        "Of all seconds, uploads among them. The paper simulates too, with coefficients fitted to "
        "an RTX 3080 and an RTX 4500 that its text does not give, so directions can be compared "
        "and sizes can't. Where its point can't be read, ours is the best of the figure."
    )
    return Table("What the plan saves", head, rows, note)


def _saved(claim: Claim, lines: Lines) -> float:
    """In per cent, at the claim's point or at the best one of all lines of its scheme."""
    savings = [
        100 * (1 - lines[name.replace(claim.scheme, PLANNED)][value] / seconds)
        for name, line in lines.items()
        if name.startswith(claim.scheme)
        for value, seconds in line.items()
        if claim.at in (None, value)
    ]
    return max(savings)


def _even_stages(seeds: range) -> Table:
    """What a pipeline saves by how even both stages are: by inference alone."""
    rows = []
    for tflops in (40, 80, 160, 320):
        row = [str(tflops)]
        for reads in _CASES.values():
            network = Network(reads_weights=reads, verify_tflops=tflops)
            draws = [serve(network, new_users(network, seed)) for seed in seeds]
            planned, plain = (
                mean(draw[name].inference for draw in draws) for name in (PLANNED, "no pipeline")
            )
            row.append(f"{100 * (1 - planned / plain):.1f}")
        rows.append(row)
    head = ["TFLOPS of the large base station", *(f"{case}, %" for case in _CASES)]
    note = "Of the seconds after the uploads. A pipeline saves the more, the more even its stages."
    return Table("What the pipeline saves", head, rows, note)


def _assumed() -> Table:
    values = asdict(Network())
    rows = [[name.replace("_", " "), f"{values[name]}"] for name in ASSUMED]
    return Table("What is assumed", ["coefficient", "value"], rows)


def _drawn(case: str, figures: dict[str, Lines]) -> Iterator[Picture]:
    for figure in FIGURES:
        found = figures[figure.name]
        colors = dict(zip(found, _COLORS, strict=False))
        y = "seconds per prompt, uploads and all"
        yield lines(
            f"Figure {figure.name}, {case}",
            found,
            colors,
            x=_X_TITLES.get(figure.field, "users"),
            y=y,
        )


def _numbers(found: dict[str, dict[str, Lines]]) -> dict[str, Any]:
    """For the JSON line: what is saved."""
    saved = {
        case: {
            f"{claim.figure}, {claim.scheme}": round(_saved(claim, lines[claim.figure]), 2)
            for claim in CLAIMS
        }
        for case, lines in found.items()
    }
    return {
        "network": asdict(Network()),
        "schemes": DESCRIPTIONS,
        "saved_percent": saved,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the first draw of users; default: 0")
    add("--draws", type=int, default=5, metavar="N", help="of users, for the mean; default: 5")
    add("--pictures", type=Path, metavar="FOLDER", help="each picture as an SVG file")
