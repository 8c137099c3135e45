"""Tokens per step of drafting setups on the measuring set: acceptance, not speed.

    python -m eval tokens_per_step --model PATH --questions question.jsonl --max-nodes 4 8 16 \\
        --temperature 0 0.7 --without map --cache cold my-cache my-memory

Each start, temperature and width is measured with all sources, and without each that `--without`
names. One `SelfSpec` is kept over all questions. At the first one it knows what the cache holds, or
nothing (`cold`). With `--remember`, it knows what earlier runs with that file learned. The figure
is all tokens over all steps, with the mean number of nodes in brackets; the last line is one JSON
object. Trees take all the nodes that they may, unless --knob names another budget: it is widths
that are compared.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import product, starmap
from typing import Any, NamedTuple

from eval.benches.prompts import Prompts, load_questions
from eval.errors import EvalError
from eval.methods.method import SelfSpecMethod
from eval.models.loading import load_asked, load_model, load_tokenizer
from eval.options import EVERY, add_knob, add_length, add_model, add_questions, parsed_knobs
from eval.report.statistics import OVERALL
from eval.runs.environment import short_name, tell
from selfspec import GenerationStats, SelfSpec
from selfspec.config import SOURCE_NAMES

_COLD = "cold"


class Setup(NamedTuple):
    """What is measured at once: a line of the table."""

    cache: str
    without: str | None  # A source that is left out.
    temperature: float
    max_nodes: int

    def __str__(self) -> str:
        without = f", without {self.without}" if self.without else ""
        start = f"{short_name(self.cache)}{without}, temperature {self.temperature:g}"
        return f"{start}, {self.max_nodes:>2} nodes"

    def new_spec(self, sources: list[str], **knobs: Any) -> SelfSpec:
        """What drafts; it knows what the cache holds."""
        named = tuple(name for name in sources if name != self.without)
        knobs = {"budget": "fixed", "sources": named, "max_nodes": self.max_nodes, **knobs}
        if self.cache == _COLD:
            return SelfSpec(**knobs)
        return SelfSpec.from_pretrained(self.cache, **knobs)


def run(options: argparse.Namespace) -> int:
    """Measures each setup in turn and prints a table."""
    asked = options.cache, [None, *options.without], options.temperature, options.max_nodes
    setups = list(starmap(Setup, product(*asked)))
    if options.remember is not None and len(setups) > 1:
        raise EvalError(
            "--remember must come with one setup, since a second one would know the questions "
            f"(got {len(setups)}); name one width, one temperature and one cache"
        )
    tokenizer = load_tokenizer(options.model)
    prompts = load_questions(options, tokenizer)
    model = load_asked(options, options.weights)
    where = {"dtype": options.dtype, "device": options.device}
    small = load_model(options.draft_model, **where) if options.draft_model else None
    knobs = {"tokenizer": tokenizer, "remember": options.remember, **parsed_knobs(options.knob)}
    knobs |= {} if small is None else {"draft_model": small}
    rows = []
    for setup in setups:
        spec = setup.new_spec(options.sources, **knobs)
        by_task = measure(model, prompts, options, spec, setup.temperature)
        cells = (
            f"{task} {stats.tokens_per_step:.2f} ({stats.nodes_per_step:.0f})"
            for task, stats in by_task.items()
        )
        print(f"{setup}: {', '.join(cells)}", flush=True)
        figures = {
            task: [round(stats.tokens_per_step, 3), round(stats.nodes_per_step, 1)]
            for task, stats in by_task.items()
        }
        rows.append({**setup._asdict(), "cache": short_name(setup.cache), "figures": figures})
    return tell("tokens_per_step", options, num_prompts=len(prompts), rows=rows)


def measure(
    model: Any,
    prompts: Prompts,
    options: argparse.Namespace,
    spec: SelfSpec,
    temperature: float,
) -> dict[str, GenerationStats]:
    """Statistics by task, and `overall`, of one `SelfSpec` kept over all prompts."""
    by_task: dict[str, GenerationStats] = defaultdict(GenerationStats)
    method = SelfSpecMethod("selfspec", spec)
    asked = {"max_new_tokens": options.max_new_tokens, "temperature": temperature}
    for index, (question, input_ids) in enumerate(prompts):
        method.answer(model, input_ids.to(model.device), seed=options.seed + index, **asked)
        by_task[question.task] += spec.stats
    return {**by_task, OVERALL: spec.total_stats}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured on, how it is sampled, and what drafts."""
    add = parser.add_argument
    add_model(parser, dtype="float32", device="cpu")
    rounded = "int8: in 8 bits, which writes other texts than the model as it is"
    add("--weights", choices=["int8"], help=rounded)
    add_questions(parser, "the first N prompts", every=EVERY)
    add_length(parser, 128)
    start = "start with each of these caches or Hub ids in turn; cold, the default: with none"
    add("--cache", nargs="+", default=[_COLD], help=start)
    add("--max-nodes", nargs="+", type=int, default=[8, 16, 32, 64], metavar="N")
    greedy = "0: greedy, the default"
    add("--temperature", nargs="+", type=float, default=[0.0], metavar="T", help=greedy)
    add("--seed", type=int, default=0, metavar="N", help="question number n gets seed N + n")
    add("--sources", nargs="*", default=list(SOURCE_NAMES), metavar="NAME")
    again = "measure everything again without each of these sources"
    add("--without", nargs="+", default=[], choices=SOURCE_NAMES, metavar="NAME", help=again)
    remember = "start with what earlier runs kept in this file, and keep what this one learns"
    add("--remember", metavar="FILE", help=remember)
    add("--draft-model", metavar="NAME", help="folder or Hub id of a small model")
    add_knob(parser)
