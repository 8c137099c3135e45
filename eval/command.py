"""The commands of `python -m eval`: what each of them does, and how it ends.

What is heavy is imported where a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval.errors import EvalError, exit_status
from eval.methods.studies import named_study, variants_of
from eval.options import check_at_least, parsed_knobs, parser

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; what the user got wrong is one line and exit status 2."""
    options = parser().parse_args(argv)
    try:
        return exit_status(lambda: int(_COMMANDS[options.command](options)))
    except KeyboardInterrupt:
        print("stopped: what is done is kept; the same command goes on", file=sys.stderr)
        return _INTERRUPTED


def _study(options: argparse.Namespace) -> int:
    study = named_study(options.name)
    if study.needs_cache and options.cache is None:
        raise EvalError(
            "this study must have --cache CACHE (got none); 'python -m eval fit --width 64' makes "
            "one"
        )
    options.study = options.name
    options.variants = variants_of(study, options.caches)
    options.methods = tuple(options.variants)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    from eval.report.pages import write_report
    from eval.report.rows import shard_path
    from eval.report.summary import brief, summary
    from eval.runs.asked import Asked, Shard
    from eval.runs.progress import RunProgress
    from eval.runs.run import run

    shard = Shard.from_environment(os.environ)
    asked = Asked.of(options)
    rows = shard_path(asked.output, shard.rank, shard.num_shards)
    record = run(asked, shard, rows, RunProgress(sys.stderr))
    if record is None:
        print(f"{shard} is done; the last one writes the report")
        return 0
    print(write_report(asked.output, record))
    print(f"report: {asked.output / 'report.html'}")
    written = str(asked.output / "summary.json")
    print(json.dumps({"bench": "run", "summary": written, "overall": brief(summary(record))}))
    return 0


def _report(options: argparse.Namespace) -> int:
    from eval.report.pages import write_pictures, write_report

    record = _record(options.folder)
    print(write_report(options.folder, record))
    if options.pictures is not None:
        for path in write_pictures(options.pictures, record):
            print(f"picture: {path}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from eval.report.compare import compared

    a, b = _record(options.a), _record(options.b)
    print(compared(a, b))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from eval.runs.simulate import recorded_texts, replays_table, simulated
    from selfspec import SpecConfig

    texts = recorded_texts(_record(options.folder))
    knobs = parsed_knobs(options.knob)
    configs = [SpecConfig.of(**{"max_nodes": n, **knobs}) for n in options.max_nodes]
    found = {config.max_nodes: simulated(config, texts, options.cache) for config in configs}
    print(replays_table(found).markdown())
    told = {n: {t: s.tokens_per_step for t, s in tasks.items()} for n, tasks in found.items()}
    print(json.dumps({"bench": "simulate", "cache": options.cache, "knobs": knobs, "rows": told}))
    lowest = min(tasks["overall"] for tasks in told.values())
    return int(options.at_least is not None and lowest < options.at_least)


def _fit(options: argparse.Namespace) -> int:
    from eval.papers.fit_tree import run

    check_at_least(options, 2, "width")
    return run(options)


def _record(folder: Path) -> Any:
    from eval.report.rows import ROWS, read_record

    record = read_record(folder)
    if not record.runs or not record.answers:
        raise EvalError(
            f"{folder} must be the --output of a run, with answers in {ROWS} (got none)"
        )
    return record


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "study": _study,
    "report": _report,
    "compare": _compare,
    "simulate": _simulate,
    "fit": _fit,
}
