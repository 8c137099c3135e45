"""Tokens per step of drafting setups on the measuring set: acceptance, not speed.

    python -m eval tokens_per_step --model PATH --questions question.jsonl --max-nodes 8 16 32 64

One `SelfSpec` is kept over all questions and knows nothing at the first one, or what the cache
of `--cache` does. With `--remember`, it knows what earlier runs with that file learned. The
figure is all tokens over all steps, with the mean number of queries in brackets, those of branches
among them; the last line is one JSON object. Trees take all the nodes that they may, unless --knob
names another budget: it is widths that are compared.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import Any

import selfspec
from eval.benches.prompts import EVERY, Prompts, load_questions
from eval.errors import EvalError
from eval.methods.method import SelfSpecMethod
from eval.models.loading import load_asked, load_model, load_tokenizer
from eval.options import add_knob, add_model, add_questions, parsed_knobs
from eval.runs.environment import told
from selfspec.config import SOURCE_NAMES


def run(options: argparse.Namespace) -> int:
    """Measures each width in turn and prints a table."""
    if options.remember is not None and len(options.max_nodes) > 1:
        raise EvalError(
            "--remember must come with one width, since a second one would know the questions "
            f"(got --max-nodes {' '.join(map(str, options.max_nodes))}); name one"
        )
    model, prompts = load(options)
    rows = {}
    for max_nodes in options.max_nodes:
        knobs = {"sources": tuple(options.sources), **parsed_knobs(options.knob)}
        spec = new_spec(options, max_nodes=max_nodes, **knobs)
        rows[max_nodes] = measure(model, prompts, options, spec)
        print(_row_line(max_nodes, rows[max_nodes]), flush=True)
    figures = {width: rounded(by_task) for width, by_task in rows.items()}
    print(json.dumps(told("tokens_per_step", options, num_prompts=len(prompts), rows=figures)))
    return 0


def load(options: argparse.Namespace) -> tuple[Any, Prompts]:
    """The model, and the prompts to measure on."""
    prompts = load_questions(options, load_tokenizer(options.model))
    return load_asked(options), prompts


def new_spec(options: argparse.Namespace, **knobs: Any) -> selfspec.SelfSpec:
    """A `SelfSpec` of full width that knows what the cache does, or nothing."""
    knobs = {"budget": "fixed", "tokenizer": load_tokenizer(options.model), **knobs}
    if options.draft_model is not None:
        where = {"dtype": options.dtype, "device": options.device}
        knobs["draft_model"] = load_model(options.draft_model, **where)
    if options.cache is None:
        return selfspec.SelfSpec(remember=options.remember, **knobs)
    return selfspec.SelfSpec.from_pretrained(options.cache, remember=options.remember, **knobs)


def measure(model: Any, prompts: Prompts, options: Any, spec: selfspec.SelfSpec) -> dict[str, Any]:
    """Statistics by task, and `overall`, of one `SelfSpec` kept over all prompts."""
    by_task: dict[str, selfspec.GenerationStats] = defaultdict(selfspec.GenerationStats)
    method = SelfSpecMethod("selfspec", spec)
    asked = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    for index, (question, input_ids) in enumerate(prompts):
        method.answer(model, input_ids.to(model.device), seed=options.seed + index, **asked)
        by_task[question.task] += spec.stats
    return {**by_task, "overall": spec.total_stats}


def _row_line(max_nodes: int, by_task: dict[str, selfspec.GenerationStats]) -> str:
    cells = (
        f"{task} {stats.tokens_per_step:.2f} ({stats.queries_per_step:.0f})"
        for task, stats in by_task.items()
    )
    return f"{max_nodes:>3} nodes: " + ", ".join(cells)


def rounded(by_task: dict[str, selfspec.GenerationStats]) -> dict[str, list[float]]:
    """[tokens per step, queries per step] of each task."""
    return {
        task: [round(stats.tokens_per_step, 3), round(stats.queries_per_step, 1)]
        for task, stats in by_task.items()
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured on, how it is sampled, and what drafts."""
    add = parser.add_argument
    add_model(parser)
    add_questions(parser, limit="the first N prompts")
    add("--cache", default=None, help="cache or Hub id; default: cold")
    add("--max-nodes", nargs="+", type=int, default=[8, 16, 32, 64])
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add("--max-new-tokens", type=int, default=128)
    add("--dtype", default="float32")
    add("--seed", type=int, default=0)
    parser.set_defaults(every=EVERY, device="cpu")
    add("--sources", nargs="*", default=list(SOURCE_NAMES))
    remember = "start with what earlier runs kept in this file, and keep what this one learns"
    add("--remember", metavar="FILE", help=remember)
    add("--draft-model", metavar="NAME", help="folder or Hub id of a small model")
    add_knob(parser)
