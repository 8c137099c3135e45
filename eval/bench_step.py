"""What drafting gains over stock, where a step's time goes, and how much there was to gain.

    python -m eval bench_step --model PATH --questions question.jsonl --dtype bfloat16

The measuring set of Spec-Bench, answered as by 'python -m eval run': all methods in turns, question
by question in rotated order, after a warm-up. Printed are a line a question, and the report: tables
by task, the share of each stage of a step, what a forward of each width costs, and the bound: what
a drafter that is always right would reach at that cost. The last line is one JSON object.

The model runs as it is; with --shape, one of that size which computes the same runs in its place.
The method forward-only runs selfspec's forward without drafts: the table's column "by drafts" is
over it, so that what drafting brings is told apart from a faster forward.

With --text random, the texts are of random tokens, drawn at temperature 1.5: what drafting costs
where it brings nothing. With --out, a run that was killed goes on where it was, and 'python -m eval
compare' takes the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from eval.benches.prompts import EVERY, MAX_PROMPT_TOKENS
from eval.errors import EvalError
from eval.methods.names import FORWARD_ONLY, OURS, STOCK
from eval.options import add_methods, add_run_options
from eval.report.pages import markdown
from eval.report.rows import ROWS
from eval.report.steps import bounds
from eval.report.summary import summary
from eval.runs.asked import Asked
from eval.runs.progress import RunProgress
from eval.runs.run import measure

_TEXTS = {"questions": ("spec-bench", 0.0), "random": ("random", 1.5)}  # Bench and temperature.
_METHODS = (STOCK, "prompt-lookup", FORWARD_ONLY, OURS)


def run(options: argparse.Namespace) -> int:
    """The exit status: 1 where an answer failed."""
    options.bench, temperature = _TEXTS[options.text]
    if options.temperature is None:
        options.temperature = temperature
    if STOCK not in options.methods:
        raise EvalError(
            f"--methods must include {STOCK!r}, which the others are compared with "
            f"(got {' '.join(options.methods)}); add it"
        )
    with TemporaryDirectory() as folder:  # For rows that nobody keeps.
        options.output = options.output or Path(folder) / ROWS
        figures = summary(measure(Asked.of(options), options.output, RunProgress(sys.stdout)))
    print(markdown(figures))
    bound = {width: each._asdict() for width, each in bounds(figures).items()}
    print(json.dumps({"bench": "bench_step", **figures, "bound": bound}))
    return int(any(name not in figures["left_out"] for name in figures["errors"]))


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", choices=sorted(_TEXTS), default="questions", help="default: questions")
    add("--out", dest="output", type=Path, metavar="FILE", help="keep rows; go on with its own")
    add_methods(parser, _METHODS)
    add_run_options(parser, limit="the first N questions")
    parser.set_defaults(in_order=True, every=EVERY, turns=1, max_prompt_tokens=MAX_PROMPT_TOKENS)
    parser.set_defaults(device="cpu", dtype="float32", threads=os.cpu_count(), temperature=None)
