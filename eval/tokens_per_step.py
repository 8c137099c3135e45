"""Tokens per step of drafting setups on the measuring set: acceptance, not speed.

    python -m eval.tokens_per_step --model PATH --questions question.jsonl --max-nodes 8 16 32 64

One `SelfSpec` is kept over all questions and cold at the start. The figure is all tokens over
all steps, with the mean number of verified nodes in brackets; the last line is one JSON object.
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
from eval.questions import Question, measuring_set, read_questions
from eval.setup import quieten, sampling, versions
from selfspec.config import SOURCE_NAMES

Prompts = list[tuple[Question, torch.Tensor]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each width in turn and prints a table."""
    options = _options(argv)
    quieten()
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    model = model.to(options.device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    questions = read_questions(options.questions)
    prompts = measuring_set(tokenizer, questions, offset=options.offset)[: options.limit]
    rows = {}
    for max_nodes in options.max_nodes:
        knobs = {"sources": tuple(options.sources), **_parsed(options.knob)}
        rows[max_nodes] = measure(model, prompts, options, max_nodes=max_nodes, **knobs)
        print(_row_line(max_nodes, rows[max_nodes]), flush=True)
    print(json.dumps(_summary(options, rows, len(prompts))))
    return 0


def measure(model: Any, prompts: Prompts, options: Any, **knobs: Any) -> dict[str, Any]:
    """Statistics by task, and `overall`, of one `SelfSpec` kept over all prompts."""
    spec = selfspec.SelfSpec(**knobs)
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
        f"{task} {stats.tokens_per_step:.2f} ({stats.nodes_per_step:.0f})"
        for task, stats in by_task.items()
    )
    return f"{max_nodes:>3} nodes: " + ", ".join(cells)


def _summary(
    options: argparse.Namespace, rows: dict[int, dict[str, Any]], num_prompts: int
) -> dict[str, Any]:
    return {
        "bench": "tokens_per_step",
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "device": options.device,
        "temperature": options.temperature,
        "sources": options.sources,
        "knobs": options.knob,
        "num_prompts": num_prompts,
        "offset": options.offset,
        "seed": options.seed,
        **versions(),
        "rows": {
            width: {
                task: [round(stats.tokens_per_step, 3), round(stats.nodes_per_step, 1)]
                for task, stats in by_task.items()
            }
            for width, by_task in rows.items()
        },
    }


def _parsed(knobs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs; values are JSON where they parse as such."""
    parsed: dict[str, Any] = {}
    for knob in knobs:
        name, _, value = knob.partition("=")
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.tokens_per_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="model id or folder")
    parser.add_argument("--questions", required=True, type=Path, help="Spec-Bench question.jsonl")
    parser.add_argument("--max-nodes", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--sources", nargs="*", default=list(SOURCE_NAMES))
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--offset", type=int, default=0, help="which tenth of the questions")
    parser.add_argument("--limit", type=int, default=None, help="measure on the first N prompts")
    parser.add_argument("--knob", nargs="*", default=[], help="other knobs, as name=value")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
