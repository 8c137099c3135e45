"""What drafting gains over stock, where a step's time goes, and how much there was to gain.

    python -m eval.bench_step --model PATH --questions question.jsonl --shape 135m --max-nodes 16

All methods answer the same prompts in turn, prompt by prompt in rotated order, in one process and
after a warm-up; a method that can't run here, or fails, has a row that says why and no figures.
Printed are a line a prompt, a table by task, the share of each stage of a step, what a forward of
each width costs, and the bound: what a drafter that is always right would reach at that cost. The
last line is one JSON object.

With --out, a run that was killed goes on where it was; what selfspec had learned by then, it learns
again from the same prompts, untimed. On CUDA, seconds end when the device is idle.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from eval.answers import STOCK, Row, row_from_json, row_to_json
from eval.bench_options import parse, settings
from eval.bench_table import (
    Costs,
    curve_json,
    curve_lines,
    figures_json,
    figures_table,
    row_line,
    stage_table,
)
from eval.errors import EvalError
from eval.figures import OVERALL, Figures, by_task
from eval.interleaved import Asked, catch_up, measure, warm_up
from eval.journal import Journal
from eval.methods import Method, MethodError, Resources, new_method
from eval.prompts import Prompts, load_model, load_prompts
from eval.setup import exit_status, parsed_knobs, quieten
from eval.tokens_per_step import new_spec
from selfspec.config import SpecConfig
from selfspec.errors import UnsupportedError
from selfspec.plugin.costs import profile

_OURS = "selfspec"  # whose figures stand at the top of the JSON

ByTask = dict[str, Figures]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 where an answer failed, 2 with one line where the run can't be made."""
    options = parse(argv, __doc__)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    quieten()
    torch.set_num_threads(options.threads)
    methods = _methods(options)
    prompts = load_prompts(options)
    model = _load(options, options.model, options.shape)
    asked_for = settings(options, model)
    journal = Journal(options.out, asked_for)
    rows, left_out = _rows(options, model, methods, prompts, journal)
    names = [method.name for method in methods if method.name not in left_out]
    figures = {name: by_task(rows, name) for name in names}
    costs = _costs(model, prompts, options)
    print(figures_table(figures, left_out))
    _print_stages(figures)
    print(costs if isinstance(costs, str) else curve_lines(costs))
    told = _told(rows, figures, costs)
    print(json.dumps({**asked_for, **told, "left_out": left_out}))
    return int(any(tasks[OVERALL].num_failed for tasks in figures.values()))


def _load(options: argparse.Namespace, name: str, shape: str | None = None) -> Any:
    return load_model(name, dtype=options.dtype, device=options.device, shape=shape)


def _methods(options: argparse.Namespace) -> list[Method]:
    """Those asked for, each with a memory of its own."""
    if STOCK not in options.methods:
        raise MethodError(
            f"--methods must include {STOCK!r}, which the others are compared with "
            f"(got {' '.join(options.methods)}); add it"
        )
    named = {"max_nodes": options.max_nodes, "budget": options.budget}
    resources = Resources(
        config=SpecConfig.of(**named | parsed_knobs(options.knob)),
        new_spec=lambda config=None, **more: new_spec(options, config=config, **more),
        assistant=None if options.assistant is None else _load(options, options.assistant),
    )
    return [new_method(name, resources) for name in dict.fromkeys(options.methods)]


def _rows(
    options: argparse.Namespace,
    model: Any,
    methods: Sequence[Method],
    prompts: Prompts,
    journal: Journal,
) -> tuple[list[Row], dict[str, str]]:
    """Every prompt's row, those of an earlier run among them; and who was left out, and why."""
    asked = Asked(options.max_new_tokens, options.temperature, options.seed)
    left_out = warm_up(model, methods, prompts, asked)
    methods = [method for method in methods if method.name not in left_out]
    rows = _known_rows(journal, prompts)
    if rows:
        print(f"{len(rows)} of {len(prompts)} prompts are in {options.out} already", flush=True)
    catch_up(model, methods, prompts[: len(rows)], asked)
    for row in measure(model, methods, prompts, asked, start=len(rows)):
        journal.append(row_to_json(row))
        rows.append(row)
        print(row_line(row), flush=True)
    return rows, left_out


def _known_rows(journal: Journal, prompts: Prompts) -> list[Row]:
    """The rows that there are already, if they are of these very prompts."""
    rows = [row_from_json(values) for values in journal.rows[: len(prompts)]]
    for row, (question, ids) in zip(rows, prompts, strict=False):
        had, asked = (row.id, row.num_prompt_tokens), (question.id, ids.shape[1])
        if had != asked:
            raise EvalError(
                f"rows to go on with must be of the same prompts, id and tokens {asked} "
                f"(got {had}); name another file with --out"
            )
    return rows


def _costs(model: Any, prompts: Prompts, options: argparse.Namespace) -> Costs | str:
    """T(width) behind a text of the usual length; or why there is none."""
    usual = int(median(ids.shape[1] for _, ids in prompts))
    num_columns = usual + options.max_new_tokens // 2
    try:
        _, curve = profile(model, num_columns=num_columns, num_rows=1)
    except UnsupportedError as error:
        return str(error)
    return Costs(curve, num_columns, options.max_nodes)


def _print_stages(figures: dict[str, ByTask]) -> None:
    for name, tasks in figures.items():
        stats = tasks[OVERALL].stats
        if stats is not None:
            print(f"{name}: {stage_table(stats)}")


def _told(rows: list[Row], figures: dict[str, ByTask], costs: Costs | str) -> dict[str, Any]:
    """What came of it, as plain values; selfspec's own overall figures at the top as well."""
    told = {
        name: {task: figures_json(each) for task, each in tasks.items()}
        for name, tasks in figures.items()
    }
    return {
        **told.get(_OURS, {}).get(OVERALL, {}),
        "num_prompts": len(rows),
        "figures": told,
        "differs": {name: _differing(rows, name) for name in figures if name != STOCK},
        **({"no_curve": costs} if isinstance(costs, str) else curve_json(costs)),
    }


def _differing(rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    """The prompts on which a method's text is not stock's; on all others it is."""
    answers = ((row, row.answers[name]) for row in rows)
    return [
        {"task": row.task, "id": row.id, "at": answer.differs_at}
        for row, answer in answers
        if answer.same is False
    ]


if __name__ == "__main__":
    sys.exit(main())
