"""Many prompts over one model: tokens a second, and how long a prompt waits for its answer.

    python -m eval bench_batch --model PATH --questions question.jsonl --limit 96

Questions of Spec-Bench are answered greedily, all at once, over --rows rows: by plain generate() in
sorted batches ("stock"), by the same batches with drafts ("drafted"), and by rows that come and go,
where the prompts start in order of arrival ("arrival") or the shortest first ("shortest"), with
drafts and without ("rows alone"). With --max-tokens, all rows of a batch together hold at most that
number of tokens. "generate_batch" is transformers' own way, which chooses its rows and memory
itself. The ways take turns in going first, round by round, each with nothing learned before. The
last line is one JSON object.

Printed are tokens a second over everything, the prompts' forwards included; the ratio to stock; the
seconds after which half of the answers were there, and all; tokens and nodes a step; and how many
texts are those of stock.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from eval.benches.prompts import load_questions
from eval.errors import EvalError
from eval.methods.names import STOCK
from eval.models.loading import load_asked, load_tokenizer
from eval.options import (
    EVERY,
    add_drafting,
    add_length,
    add_model,
    add_questions,
    check_at_least,
    checked_knobs,
)
from eval.report.table import Table
from eval.runs.environment import tell
from eval.runs.many import DEFAULTS, WAYS, Answered, Many, answered
from eval.runs.turns import in_turns

_COLUMNS = {
    "way": "{way}",
    "tokens/s": "{tokens_per_second:.1f}",
    "of stock's": "{of_stock:.2f}",
    "half done, s": "{half_s:.1f}",
    "all done, s": "{all_s:.1f}",
    "tokens a step": "{tokens_per_step:.2f}",
    "nodes a step": "{nodes_per_step:.1f}",
    "texts of stock": "{num_same}",
}


def run(options: argparse.Namespace) -> int:
    """Measures all ways, and prints a table and the JSON line."""
    knobs = checked_knobs(options)
    check_at_least(options, 1, "rows", "rounds", "max_new_tokens")
    unknown = sorted(set(options.methods) - set(WAYS))
    if unknown or STOCK not in options.methods:
        raise EvalError(
            f"--methods must be of {', '.join(map(repr, WAYS))}, with {STOCK!r} among them (got "
            f"{' '.join(unknown or options.methods)})"
        )
    tokenizer = load_tokenizer(options.model)
    prompts = [ids[0].tolist() for _, ids in load_questions(options, tokenizer)]
    limits = options.max_new_tokens, options.rows, options.max_tokens
    many = Many(load_asked(options), tokenizer, prompts, *limits, knobs)
    # First forwards are slow, so each way answers two prompts that don't count.
    short = replace(many, prompts=sorted(prompts, key=len)[:2], max_new_tokens=8)
    for name in options.methods:
        answered(name, short)
    results = in_turns(
        options.methods,
        options.rounds,
        lambda name: answered(name, many),
        lambda each: f"{_rate(each):.2f} tokens/s",
    )
    figures = {name: _figures(found, results[STOCK]) for name, found in results.items()}
    title = f"{len(prompts)} prompts, {options.rows} rows, {options.max_new_tokens} new tokens"
    note = "Medians over rounds; tokens/s with the prompts' forwards."
    rows = [{"way": name, **figure} for name, figure in figures.items()]
    print(f"\n{Table.of(title, _COLUMNS, rows, note).markdown()}")
    found = {"num_prompts": len(prompts), "threads": torch.get_num_threads(), "figures": figures}
    return tell("bench_batch", options, **found)


def _rate(found: Answered) -> float:
    """Tokens a second."""
    return sum(map(len, found.texts)) / max(found.ends)


def _figures(found: Sequence[Answered], stock: Sequence[Answered]) -> dict[str, Any]:
    """The figures of one way, as medians over the rounds."""
    last, rate = found[-1], median(map(_rate, found))
    stats = last.spec.total_stats if last.spec else None
    pairs = zip(last.texts, stock[-1].texts, strict=True)
    return {
        "tokens_per_second": rate,
        "of_stock": rate / median(map(_rate, stock)),
        "half_s": median(median(result.ends) for result in found),
        "all_s": median(max(result.ends) for result in found),
        "tokens_per_step": stats.tokens_per_step if stats else 1.0,
        "nodes_per_step": stats.num_nodes / max(stats.num_steps, 1) if stats else 1.0,
        "num_tokens": sum(map(len, last.texts)),
        "num_same": sum(ours == theirs for ours, theirs in pairs),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, required=True, dtype="float32", device="cpu")
    add_questions(parser, "the first N of those that are left", every=EVERY)
    add_length(parser, 128)
    add("--rows", type=int, default=8, metavar="N", help="of a batch; default: %(default)s")
    add("--max-tokens", type=int, metavar="N", help="of all rows together; default: no limit")
    add("--rounds", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--methods", nargs="+", default=list(DEFAULTS), metavar="WAY", help="default: %(default)s")
    add_drafting(parser)
