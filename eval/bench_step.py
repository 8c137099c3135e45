"""What drafting gains over stock, where a step's time goes, and how much there was to gain.

    python -m eval bench_step --model PATH --questions question.jsonl --dtype bfloat16

The measuring set of Spec-Bench, answered as by 'python -m eval run': all methods in turns, question
by question in rotated order, after a warm-up. Printed are a line a question, and the report: tables
by task, the share of each stage of a step, what a forward of each width costs, and the bound: what
a drafter that is always right would reach at that cost. The last line is one JSON object.

The model runs as it is; with --shape, one of that size which computes the same runs in its place.
The method forward-only runs selfspec's forward without drafts: the table's column "by drafts" is
over it, so that what drafting brings is told apart from a faster forward.

With --host-only, no model is timed: recorded answers are decoded again beside forwards that are
taken to need 4, 8 and 20 ms, and printed is what the CPU does in a step meanwhile, by stage. --out
keeps what was recorded, and a run that finds it there needs no model.

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

from eval.benches.prompts import EVERY, MAX_PROMPT_TOKENS, load_prompts
from eval.errors import EvalError
from eval.methods.names import FORWARD_ONLY, OURS, STOCK
from eval.models.loading import load_asked, load_tokenizer
from eval.options import add_methods, add_run_options, drafting_knobs
from eval.report.pages import markdown
from eval.report.rows import ROWS
from eval.report.steps import bounds, host_table
from eval.report.summary import summary
from eval.runs.asked import Asked
from eval.runs.environment import versions
from eval.runs.hosted import host_times
from eval.runs.progress import RunProgress
from eval.runs.recorded import RecordedText, read_texts, record, write_texts
from eval.runs.run import measure
from selfspec import SpecConfig, attach

_BENCHES = {"questions": "spec-bench", "random": "random"}  # by kind of text
_METHODS = (STOCK, "prompt-lookup", FORWARD_ONLY, OURS)
_TEMPERATURES = {"questions": 0.0, "random": 1.5}
_HOST_WIDTHS = (16, 64)
_FORWARD_MS = (4, 8, 20)
_NUM_TEXTS = 8


def run(options: argparse.Namespace) -> int:
    """The exit status: 1 where an answer failed."""
    options.bench = _BENCHES[options.text]
    if options.temperature is None:
        options.temperature = _TEMPERATURES[options.text]
    return _host_only(options) if options.host_only else _measure(options)


def _measure(options: argparse.Namespace) -> int:
    if STOCK not in options.methods:
        raise EvalError(
            f"--methods must include {STOCK!r}, which the others are compared with "
            f"(got {' '.join(options.methods)}); add it"
        )
    with _rows_file(options.output) as options.output:
        answered = measure(Asked.of(options), options.output, RunProgress(sys.stdout))
    figures = summary(answered)
    print(markdown(figures))
    bound = {width: each._asdict() for width, each in bounds(figures).items()}
    print(json.dumps({"bench": "bench_step", **figures, "bound": bound}))
    return int(any(name not in figures["left_out"] for name in figures["errors"]))


def _host_only(options: argparse.Namespace) -> int:
    """What a step takes beside its forward, for trees of fixed widths."""
    texts = _recorded(options)
    found = {
        width: {forward: _of_host(texts, width, forward, options) for forward in _FORWARD_MS}
        for width in _HOST_WIDTHS
    }
    print(host_table(found).markdown() + "\n")
    print(json.dumps({"bench": "bench_step", "host_only": True, **versions(), "host": found}))
    return 0


def _recorded(options: argparse.Namespace) -> list[RecordedText]:
    """Real answers, from a file or from the model, with what it says behind wide trees."""
    if options.output is not None and options.output.exists():
        return read_texts(options.output)
    options.limit = options.limit or _NUM_TEXTS
    prompts = load_prompts(options, load_tokenizer(options.model))
    asked = {"temperature": 0.0, "max_nodes": max(_HOST_WIDTHS)}
    asked["max_new_tokens"] = options.max_new_tokens
    texts = list(record(attach(load_asked(options)), prompts, **asked))
    if options.output is not None:
        write_texts(options.output, texts)
    return texts


def _of_host(
    texts: Sequence[RecordedText], width: int, forward_ms: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The round in which the CPU had least to do: others may have disturbed it."""
    knobs = {"budget": "fixed", **drafting_knobs(options), "max_nodes": width}
    config = SpecConfig.of(**knobs)
    rounds = [host_times(texts, config, forward_ms / 1000) for _ in range(options.rounds)]
    times = min(rounds, key=lambda each: each.a_step(each.whole))
    if not times.num_steps:
        raise EvalError(
            f"--host-only must see a tree of {width} nodes (got none); record longer answers"
        )
    beside = times.a_step(times.whole) - forward_ms
    return {
        "num_steps": times.num_steps,
        "tokens_per_step": round(times.num_tokens / max(times.num_steps, 1), 3),
        "stage_ms": {stage: round(times.a_step(s), 4) for stage, s in times.by_stage.items()},
        "beside_ms": round(beside, 4),
        "share": round(beside / forward_ms, 4),
    }


@contextmanager
def _rows_file(path: Path | None) -> Iterator[Path]:
    """Where rows go: a file that stays, or one for this run alone."""
    if path is not None:
        yield path
        return
    with TemporaryDirectory() as folder:
        yield Path(folder) / ROWS


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", choices=sorted(_BENCHES), default="questions", help="default: questions")
    add("--out", dest="output", type=Path, metavar="FILE", help="keep rows; go on with its own")
    add("--host-only", action="store_true", help="only what the CPU does beside a forward")
    add_methods(parser, _METHODS)
    add_run_options(parser, limit="the first N questions")
    parser.set_defaults(in_order=True, every=EVERY, turns=1, max_prompt_tokens=MAX_PROMPT_TOKENS)
    parser.set_defaults(device="cpu", dtype="float32", threads=os.cpu_count(), temperature=None)
