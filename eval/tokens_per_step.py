"""Tokens per step of drafting setups on the measuring set: acceptance, not speed.

    python -m eval.tokens_per_step --model PATH --questions question.jsonl --max-nodes 8 16 32 64

One `SelfSpec` is kept over all questions and knows nothing at the first one, or what the cache
of `--cache` does. The figure is all tokens over all steps, with the mean number of queries in
brackets, those of branches among them; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import selfspec
from eval.prompts import Prompts, load_model, load_questions
from eval.setup import parsed_knobs, quieten, sampling, versions
from selfspec.config import SOURCE_NAMES


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each width in turn and prints a table."""
    options = _options(argv)
    model, prompts = load(options)
    rows = {}
    for max_nodes in options.max_nodes:
        knobs = {"sources": tuple(options.sources), **parsed_knobs(options.knob)}
        spec = new_spec(options, max_nodes=max_nodes, **knobs)
        rows[max_nodes] = measure(model, prompts, options, spec)
        print(_row_line(max_nodes, rows[max_nodes]), flush=True)
    figures = {width: rounded(by_task) for width, by_task in rows.items()}
    print(json.dumps({**settings(options, len(prompts)), "rows": figures}))
    return 0


def load(options: argparse.Namespace) -> tuple[Any, Prompts]:
    """The model, and the prompts to measure on."""
    quieten()
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    return model, load_questions(options, tokenizer)


def new_spec(options: argparse.Namespace, **knobs: Any) -> selfspec.SelfSpec:
    """A `SelfSpec` that knows what the cache does, or nothing."""
    if options.cache is None:
        return selfspec.SelfSpec(**knobs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    extra = knobs.pop("extra_sources", ())
    return selfspec.SelfSpec.from_pretrained(
        options.cache, tokenizer=tokenizer, extra_sources=extra, **knobs
    )


def measure(model: Any, prompts: Prompts, options: Any, spec: selfspec.SelfSpec) -> dict[str, Any]:
    """Statistics by task, and `overall`, of one `SelfSpec` kept over all prompts."""
    by_task: dict[str, selfspec.GenerationStats] = defaultdict(selfspec.GenerationStats)
    for index, (question, input_ids) in enumerate(prompts):
        torch.manual_seed(options.seed + index)
        model.generate(
            input_ids.to(model.device),
            attention_mask=torch.ones_like(input_ids).to(model.device),
            custom_generate=spec,
            max_new_tokens=options.max_new_tokens,
            **sampling(options.temperature),
        )
        by_task[question.task] += spec.stats
    return {**by_task, "overall": spec.total_stats}


def _row_line(max_nodes: int, by_task: dict[str, selfspec.GenerationStats]) -> str:
    cells = (
        f"{task} {stats.tokens_per_step:.2f} ({stats.queries_per_step:.0f})"
        for task, stats in by_task.items()
    )
    return f"{max_nodes:>3} nodes: " + ", ".join(cells)


def settings(options: argparse.Namespace, num_prompts: int) -> dict[str, Any]:
    """What a figure was measured with, but for what varies from line to line."""
    return {
        "bench": "tokens_per_step",
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "device": options.device,
        "temperature": options.temperature,
        "sources": options.sources,
        "knobs": options.knob,
        "cache": None if options.cache is None else Path(options.cache).name,
        "num_prompts": num_prompts,
        "offset": options.offset,
        "every": options.every,
        "task": options.task,
        "seed": options.seed,
        **versions(),
    }


def rounded(by_task: dict[str, selfspec.GenerationStats]) -> dict[str, list[float]]:
    """[tokens per step, queries per step] of each task."""
    return {
        task: [round(stats.tokens_per_step, 3), round(stats.queries_per_step, 1)]
        for task, stats in by_task.items()
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.tokens_per_step", description=__doc__)
    add_options(parser)
    parser.add_argument("--sources", nargs="*", default=list(SOURCE_NAMES))
    parser.add_argument("--knob", nargs="*", default=[], help="other knobs, as name=value")
    return parser.parse_args(argv)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured on, and how it is sampled."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="model id or folder")
    parser.add_argument("--questions", required=True, type=Path, help="Spec-Bench question.jsonl")
    parser.add_argument("--cache", default=None, help="cache folder or Hub id; default: cold")
    parser.add_argument("--max-nodes", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--offset", type=int, default=0, help="which tenth of the questions")
    parser.add_argument("--every", type=int, default=10, help="1: all questions of each task")
    parser.add_argument("--task", default=None, help="questions of this task alone")
    parser.add_argument("--limit", type=int, default=None, help="measure on the first N prompts")


if __name__ == "__main__":
    sys.exit(main())
