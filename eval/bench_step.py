"""What drafting gains over stock, where a step's time goes, and how much there was to gain.

    python -m eval.bench_step --model PATH --questions question.jsonl --dtype bfloat16

The measuring set of Spec-Bench, answered as by 'python -m eval run': all methods in turns, question
by question in rotated order, after a warm-up. Printed are a line a question, a table by task, the
share of each stage of a step, what a forward of each width costs, and the bound: what a drafter
that is always right would reach at that cost. The last line is one JSON object.

The model runs as it is; with --shape, one of that size which computes the same runs in its place.
The method forward-only runs selfspec's forward without drafts: the table's column "drafting alone"
is over it, so that what drafting brings is told apart from a faster forward.

With --text random, the texts are of random tokens, drawn at temperature 1.5: what drafting costs
where it brings nothing. With --out, a run that was killed goes on where it was, and 'python -m eval
compare' takes the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eval.benches.prompts import EVERY, MAX_PROMPT_TOKENS
from eval.errors import EvalError, exit_status
from eval.methods.names import FORWARD_ONLY, OURS, STOCK
from eval.options import add_methods, add_run_options, described
from eval.report.rows import ROWS, Record
from eval.report.statistics import OVERALL
from eval.report.steps import bounds, curve_table, stages_table
from eval.report.summary import summary, trust
from eval.report.tables import steps_table
from eval.runs.asked import Asked, Shard
from eval.runs.progress import RunProgress
from eval.runs.run import run
from selfspec import SpecConfig
from selfspec.cost import CostCurve

__all__ = ["main"]

_BENCHES = {"questions": "spec-bench", "random": "random"}  # by kind of text
_METHODS = (STOCK, "prompt-lookup", FORWARD_ONLY, OURS)
_TEMPERATURES = {"questions": 0.0, "random": 1.5}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 where an answer failed, 2 with one line where the run can't be made."""
    options = _options(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if STOCK not in options.methods:
        raise EvalError(
            f"--methods must include {STOCK!r}, which the others are compared with "
            f"(got {' '.join(options.methods)}); add it"
        )
    with _rows_file(options.output) as options.output:
        record = run(Asked.of(options), Shard(), options.output, RunProgress(sys.stdout))
    assert record is not None  # one process answers all
    figures = summary(record)
    max_nodes = SpecConfig.of(**figures["settings"]["knobs"]).max_nodes
    tables = [steps_table(figures), stages_table(figures)]
    if record.curve is not None:
        curve = CostCurve.from_dict(record.curve)
        tables.append(curve_table(curve, record.curve["num_columns"], max_nodes))
    print("\n\n".join(table.markdown() for table in tables if table is not None))
    print(f"\n{trust(figures)}")
    print(json.dumps(_told(figures, record)))
    return int(any(name not in figures["left_out"] for name in figures["errors"]))


@contextmanager
def _rows_file(path: Path | None) -> Iterator[Path]:
    """Where rows go: a file that stays, or one for this run alone."""
    if path is not None:
        yield path
        return
    with TemporaryDirectory() as folder:
        yield Path(folder) / ROWS


def _told(figures: dict[str, Any], record: Record) -> dict[str, Any]:
    """All figures, as plain values; selfspec's own overall ones at the top as well."""
    settings, left_out = figures["settings"], figures["left_out"]
    methods = {name: parts for name, parts in figures["methods"].items() if name not in left_out}
    config = SpecConfig.of(**settings["knobs"])
    return {
        **figures["environment"],
        **settings,
        "bench": "bench_step",
        "text": settings["bench"],
        "max_nodes": config.max_nodes,
        "budget": config.budget,
        **methods.get(OURS, {}).get(OVERALL, {}),
        "num_prompts": len({key[:2] for key in record.answers}),
        "figures": methods,
        "differs": {name: _differing(record, name) for name in methods if name != STOCK},
        "left_out": left_out,
        "stock_variation": figures["stock_variation"],
        "errors": figures["errors"],
        **_curve_json(record, config.max_nodes),
    }


def _differing(record: Record, method: str) -> list[dict[str, Any]]:
    """The answers that are not stock's, and from which token on."""
    given = [each for each in record.answers.values() if each.method == method and each.numbers]
    return [
        {"task": each.task, "questions": each.questions, "at": each.numbers.differs_at}
        for each in given
        if each.numbers is not None and each.numbers.differs_at is not None
    ]


def _curve_json(record: Record, max_nodes: int) -> dict[str, Any]:
    """T(width) in milliseconds, and the bounds; null where it could not be measured."""
    if record.curve is None:
        return {"curve": None, "bound": None}
    curve = CostCurve.from_dict(record.curve)
    times = {str(width): round(1000 * curve.seconds(width), 4) for width in curve.widths}
    return {
        "curve": {"context": record.curve["num_columns"], "ms": times},
        "bound": {
            str(width): {"speed_up": round(each.speed_up, 3), "width": each.width}
            for width, each in bounds(curve, max_nodes).items()
        },
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described("bench_step", __doc__)
    add = parser.add_argument
    add("--text", choices=sorted(_BENCHES), default="questions", help="default: questions")
    add("--out", dest="output", type=Path, metavar="FILE", help="keep rows; go on with its own")
    add_methods(parser, _METHODS)
    add_run_options(parser, limit="the first N questions")
    parser.set_defaults(in_order=True, every=EVERY, turns=1, max_prompt_tokens=MAX_PROMPT_TOKENS)
    parser.set_defaults(device="cpu", dtype="float32", threads=os.cpu_count(), temperature=None)
    options = parser.parse_args(argv)
    options.bench = _BENCHES[options.text]
    if options.temperature is None:
        options.temperature = _TEMPERATURES[options.text]
    return options


if __name__ == "__main__":
    sys.exit(main())
