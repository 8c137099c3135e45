"""What streaming a model that is larger than memory costs, and what drafting gains there.

    python -m eval bench_streamed --model PATH --questions question.jsonl --max-memory 25% 50%

Questions of Spec-Bench are answered greedily within each budget of memory: by accelerate's disk
offload, and by streamed weights alone, with prompt lookup, with selfspec, and with the draft model
of --draft-model beside selfspec's sources, which is a part of the budget. Each method runs in a
process of its own, which starts with nothing of the model in the page cache and drops its files
from there again and again, as a machine without room for them does. The methods take turns in going
first, round by round. Needs Linux. The last line is one JSON object.

Printed are decoded tokens a second without the prompts' forwards, tokens and nodes a step, the
megabytes that a forward reads, the share of the time of reading that forwards did not wait for,
and the peak of the process's own memory beyond what it had before the model, with that of the
page cache beside it. The nodes of prompt lookup are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.benches.prompts import load_questions
from eval.errors import EvalError
from eval.jobs.start import in_new_process
from eval.jobs.streamed import ACCELERATE, SMALL, STREAMED_METHODS, Job, Result
from eval.models.loading import load_tokenizer
from eval.options import (
    EVERY,
    add_drafting,
    add_length,
    add_questions,
    check_at_least,
    checked_knobs,
)
from eval.report.table import Table
from eval.runs.environment import tell
from eval.runs.turns import in_turns
from selfspec.machine.memory import amount_in_bytes
from selfspec.weights.streamed.memory_plan import text_bytes

_DTYPES = ("float32", "bfloat16", "float16")
_COLUMNS = {
    "method": "{method}",
    "tokens/s": "{tokens_per_second:.2f}",
    "least to most": "{least:.2f}–{most:.2f}",
    "times the first": "{ratio:.2f}x",
    "tokens a step": "{tokens_per_step:.2f}",
    "nodes a step": "{nodes_per_step:.1f}",
    "MB read a step": "{bytes_per_step!m:.0f}",
    "hidden": "{hidden:.0%}",
    "peak, MB": "{peak_bytes!m:.0f}",
    "cached, MB": "{peak_cached!m:.0f}",
    "same text": "{same_texts} of {num_texts}",
}


class _Budget(NamedTuple):
    """What a method may take, in bytes, and how many of them are not for weights."""

    num_bytes: int
    for_text: int


def run(options: argparse.Namespace) -> int:
    """Measures all budgets, and prints a table for each and the JSON line."""
    knobs = checked_knobs(options)
    check_at_least(options, 1, "rounds")
    if options.methods is None:
        options.methods = [
            name for name in STREAMED_METHODS if name != SMALL or options.draft_model
        ]
    if SMALL in options.methods and not options.draft_model:
        raise EvalError(f"method {SMALL!r} must have --draft-model FOLDER (got none); name one")
    prompts = [ids[0].tolist() for _, ids in load_questions(options, load_tokenizer(options.model))]
    asked = "max_length", "max_new_tokens", "dtype", "threads"
    common = Job(
        model=str(Path(options.model).expanduser().resolve()),
        method="",
        max_memory=0,
        prompts=prompts,
        knobs=knobs,
        **{name: getattr(options, name) for name in asked},
    )
    figures: dict[str, Any] = {}
    for text, budget in _budgets(options).items():

        def answer(name: str, budget: _Budget = budget) -> Result:
            return _answered(_job(options, name, budget, common))

        found = in_turns(
            options.methods,
            options.rounds,
            answer,
            lambda each: f"{_rate(each):.2f} tokens/s",
            f"{text}, ",
        )
        first = next(iter(found.values()))
        rows = {name: _figures(result, first) for name, result in found.items()}
        title = f"Within {text}: {budget.num_bytes / 1e6:.0f} MB"
        note = "Medians over the rounds. Same text: answers equal to those of the first method."
        cells = [{"method": name, "num_texts": len(prompts), **row} for name, row in rows.items()]
        print(f"\n{Table.of(title, _COLUMNS, cells, note).markdown()}")
        figures[text] = {"max_bytes": budget.num_bytes, "methods": rows}
    given = {"knobs": knobs, "num_prompts": len(prompts), "figures": figures}
    return tell("bench_streamed", options, **given)


def _job(options: argparse.Namespace, method: str, budget: _Budget, common: Job) -> Job:
    """What a method is asked; accelerate's budget is for weights alone."""
    max_memory = budget.num_bytes - (budget.for_text if method == ACCELERATE else 0)
    draft_model = options.draft_model if method == SMALL else None
    return common._replace(method=method, max_memory=max_memory, draft_model=draft_model)


def _budgets(options: argparse.Namespace) -> dict[str, _Budget]:
    config = AutoConfig.from_pretrained(options.model).get_text_config(decoder=True)
    files = Path(options.model).expanduser().glob("*.safetensors")
    dtype, stored = getattr(torch, options.dtype), config.dtype or torch.float32
    weights = sum(file.stat().st_size for file in files) * dtype.itemsize // stored.itemsize
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for_text = text_bytes(model, options.max_length)
    whole = weights + for_text
    return {text: _Budget(amount_in_bytes(text, whole), for_text) for text in options.max_memory}


def _answered(job: Job) -> Result:
    what = f"{job.method!r} failed with {job.max_memory} bytes"
    return Result(**in_new_process("eval.jobs.streamed", job, what))


def _rate(result: Result) -> float:
    """Decoded tokens a second; the prompts' forwards yield one of each text."""
    return sum(len(text) - 1 for text in result.texts) / result.seconds


def _figures(found: Sequence[Result], first: Sequence[Result]) -> dict[str, Any]:
    """The figures of one method beside the first, as medians over rounds where rounds differ."""
    last, rates = found[-1], [_rate(result) for result in found]
    num_tokens = sum(len(text) - 1 for text in last.texts)
    hidden = [
        1 - result.seconds_waited / result.seconds_read for result in found if result.seconds_read
    ]
    return {
        "tokens_per_second": median(rates),
        "least": min(rates),
        "most": max(rates),
        "ratio": median(rates) / median(map(_rate, first)),
        "tokens_per_step": num_tokens / last.num_steps,
        "nodes_per_step": None if last.num_nodes is None else last.num_nodes / last.num_steps,
        "bytes_per_step": median(result.bytes_read / result.num_forwards for result in found),
        "hidden": max(0.0, median(hidden)) if hidden else None,
        "peak_bytes": max(result.peak_bytes for result in found),
        "peak_cached": max(result.peak_cached for result in found),
        "same_texts": sum(a == b for a, b in zip(last.texts, first[-1].texts, strict=True)),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="a folder with safetensors files")
    add("--max-memory", nargs="+", default=["25%", "50%", "75%", "100%"], metavar="AMOUNT")
    names = f"of {', '.join(STREAMED_METHODS)}; default: all that can take part"
    add("--methods", nargs="+", choices=STREAMED_METHODS, metavar="NAME", help=names)
    add("--draft-model", metavar="FOLDER", help="a small model, resident, that drafts too")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="default: bfloat16")
    add_length(parser, 32)
    add("--max-length", type=int, default=1024, metavar="N", help="of the KV; default: 1024")
    add("--rounds", type=int, default=1, metavar="N", help="default: 1")
    add("--threads", type=int, metavar="N", help="of the CPU; default: torch's own number")
    add_questions(parser, "the first N questions", every=EVERY)
    add_drafting(parser)
    parser.set_defaults(limit=3)
