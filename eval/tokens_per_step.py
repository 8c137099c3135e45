"""Tokens per step of drafting setups on the measuring set: acceptance, not speed.

    python -m eval tokens_per_step --model PATH --questions question.jsonl --max-nodes 8 16 32 64

One `SelfSpec` is kept over all questions and knows nothing at the first one, or what the cache
of `--cache` does. With `--remember`, it knows what earlier runs with that file learned. The
figure is all tokens over all steps, with the mean number of nodes in brackets; the last line is one
JSON object. Trees take all the nodes that they may, unless --knob
names another budget: it is widths that are compared.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from functools import partial
from typing import Any

from eval.benches.prompts import EVERY, Prompts, load_questions
from eval.errors import EvalError
from eval.methods.method import SelfSpecMethod
from eval.models.loading import load_asked, load_model, load_tokenizer
from eval.options import add_knob, add_length, add_model, add_questions, parsed_knobs
from eval.report.statistics import OVERALL
from eval.runs.environment import told
from selfspec import GenerationStats, SelfSpec
from selfspec.config import SOURCE_NAMES


def run(options: argparse.Namespace) -> int:
    """Measures each width in turn and prints a table."""
    if options.remember is not None and len(options.max_nodes) > 1:
        raise EvalError(
            "--remember must come with one width, since a second one would know the questions "
            f"(got --max-nodes {' '.join(map(str, options.max_nodes))}); name one"
        )
    tokenizer = load_tokenizer(options.model)
    prompts = load_questions(options, tokenizer)
    model = load_asked(options)
    where = {"dtype": options.dtype, "device": options.device}
    small = load_model(options.draft_model, **where) if options.draft_model else None
    knobs = {"budget": "fixed", "tokenizer": tokenizer, "sources": tuple(options.sources)}
    knobs |= {"remember": options.remember, **parsed_knobs(options.knob)}
    knobs |= {} if small is None else {"draft_model": small}
    rows = {}
    for max_nodes in options.max_nodes:
        new = partial(SelfSpec.from_pretrained, options.cache) if options.cache else SelfSpec
        by_task = measure(model, prompts, options, new(max_nodes=max_nodes, **knobs))
        cells = (
            f"{task} {stats.tokens_per_step:.2f} ({stats.nodes_per_step:.0f})"
            for task, stats in by_task.items()
        )
        print(f"{max_nodes:>3} nodes: {', '.join(cells)}", flush=True)
        rows[max_nodes] = {
            task: [round(stats.tokens_per_step, 3), round(stats.nodes_per_step, 1)]
            for task, stats in by_task.items()
        }
    print(json.dumps(told("tokens_per_step", options, num_prompts=len(prompts), rows=rows)))
    return 0


def measure(
    model: Any, prompts: Prompts, options: argparse.Namespace, spec: SelfSpec
) -> dict[str, GenerationStats]:
    """Statistics by task, and `overall`, of one `SelfSpec` kept over all prompts."""
    by_task: dict[str, GenerationStats] = defaultdict(GenerationStats)
    method = SelfSpecMethod("selfspec", spec)
    asked = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    for index, (question, input_ids) in enumerate(prompts):
        method.answer(model, input_ids.to(model.device), seed=options.seed + index, **asked)
        by_task[question.task] += spec.stats
    return {**by_task, OVERALL: spec.total_stats}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured on, how it is sampled, and what drafts."""
    add = parser.add_argument
    add_model(parser, dtype="float32", device="cpu")
    add_questions(parser, "the first N prompts", every=EVERY)
    add_length(parser, 128)
    add("--cache", help="cache or Hub id; default: cold")
    add("--max-nodes", nargs="+", type=int, default=[8, 16, 32, 64], metavar="N")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy, the default")
    add("--seed", type=int, default=0, metavar="N", help="question number n gets seed N + n")
    add("--sources", nargs="*", default=list(SOURCE_NAMES), metavar="NAME")
    remember = "start with what earlier runs kept in this file, and keep what this one learns"
    add("--remember", metavar="FILE", help=remember)
    add("--draft-model", metavar="NAME", help="folder or Hub id of a small model")
    add_knob(parser)
