"""Many prompts over one model: tokens a second, and how long a prompt waits for its answer.

    python -m eval.bench_batch --model PATH --questions question.jsonl --limit 96

Questions of Spec-Bench are answered greedily, all at once, over so many rows: by plain generate()
in sorted batches ("stock"), by the same batches with drafts ("drafted"), and by rows that come and
go, where the prompts start in order of arrival ("arrival") or the shortest first ("shortest"),
with drafts and without ("rows alone"). With --max-tokens, all rows of a batch hold so many tokens
at most. "generate_batch" is transformers' own way, which chooses its rows and memory itself. The
ways take turns in going first, round by round, each with nothing learned before. The last line is
one JSON object.

Printed are tokens a second over everything, the prompts' forwards included; the ratio to stock; the
seconds after which half of the answers were there, and all; tokens and nodes a step; and how many
texts are those of stock.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from eval.benches.prompts import EVERY, load_questions
from eval.errors import EvalError, exit_status
from eval.methods.names import STOCK, rotated
from eval.models.loading import load_model, load_tokenizer, quieten
from eval.options import (
    add_drafting,
    add_questions,
    add_required_model,
    checked_knobs,
    described,
)
from eval.report.tables import Table
from eval.runs.environment import short_name, versions
from eval.runs.many import DEFAULTS, WAYS, Answered, Many, answered

__all__ = ["main"]

Results = dict[str, list[Answered]]  # By way, in the order of the rounds.


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all ways, and prints a table and the JSON line."""
    options = _options(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    knobs = checked_knobs(options)
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quieten()
    tokenizer = load_tokenizer(options.model)
    prompts = [ids[0].tolist() for _, ids in load_questions(options, tokenizer)]
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    many = Many(
        model, tokenizer, prompts, options.max_new_tokens, options.rows, options.max_tokens, knobs
    )
    _warm_up(many, options.methods)
    results: Results = {name: [] for name in options.methods}
    for number in range(options.rounds):
        for name in rotated(options.methods, number):
            results[name].append(answered(name, many))
            rate = _tokens_per_second(results[name][-1])
            print(f"round {number + 1}: {name} {rate:.2f} tokens/s", flush=True)
    figures = {name: _figures(found, results[STOCK][-1]) for name, found in results.items()}
    print(f"\n{_table(figures, many).markdown()}")
    print(json.dumps(_told(options, len(prompts), figures)))
    return 0


def _check(options: argparse.Namespace) -> None:
    unknown = sorted(set(options.methods) - set(WAYS))
    if unknown or STOCK not in options.methods:
        raise EvalError(
            f"--methods must be of {', '.join(map(repr, WAYS))}, with {STOCK!r} among them (got "
            f"{' '.join(unknown or options.methods)})"
        )
    for name in ("rows", "rounds", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise EvalError(
                f"--{name.replace('_', '-')} must be >= 1 (got {getattr(options, name)})"
            )


def _warm_up(many: Many, methods: Sequence[str]) -> None:
    """First forwards are slow, so each way answers two prompts that don't count."""
    short = sorted(many.prompts, key=len)[:2]
    for name in methods:
        answered(name, replace(many, prompts=short, max_new_tokens=8))


def _tokens_per_second(found: Answered) -> float:
    return sum(map(len, found.texts)) / max(found.ends)


def _figures(found: Sequence[Answered], stock: Answered) -> dict[str, Any]:
    """The figures of one way, as medians over the rounds."""
    last = found[-1]
    stats = last.spec.total_stats if last.spec else None
    pairs = zip(last.texts, stock.texts, strict=True)
    return {
        "tokens_per_second": median(map(_tokens_per_second, found)),
        "half_s": median(median(each.ends) for each in found),
        "all_s": median(max(each.ends) for each in found),
        "tokens_per_step": stats.tokens_per_step if stats else 1.0,
        "nodes_per_step": stats.num_nodes / max(stats.num_steps, 1) if stats else 1.0,
        "num_tokens": sum(map(len, last.texts)),
        "num_same": sum(ours == theirs for ours, theirs in pairs),
    }


def _table(figures: dict[str, dict[str, Any]], many: Many) -> Table:
    base = figures[STOCK]["tokens_per_second"]
    rows = [
        [
            name,
            f"{each['tokens_per_second']:.1f}",
            f"{each['tokens_per_second'] / base:.2f}",
            f"{each['half_s']:.1f}",
            f"{each['all_s']:.1f}",
            f"{each['tokens_per_step']:.2f}",
            f"{each['nodes_per_step']:.1f}",
            f"{each['num_same']} of {len(many.prompts)}",
        ]
        for name, each in figures.items()
    ]
    head = ["way", "tokens/s", "of stock's", "half done, s", "all done, s", "tokens a step"]
    head += ["nodes a step", "texts of stock"]
    title = f"{len(many.prompts)} prompts, {many.max_rows} rows, {many.max_new_tokens} new tokens"
    return Table(title, head, rows, "Medians over rounds; tokens/s with the prompts' forwards.")


def _told(
    options: argparse.Namespace, num_prompts: int, figures: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    return {
        "bench": "bench_batch",
        "model": short_name(options.model),
        **versions(),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "num_prompts": num_prompts,
        "rows": options.rows,
        "max_tokens": options.max_tokens,
        "max_new_tokens": options.max_new_tokens,
        "rounds": options.rounds,
        "figures": figures,
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described("bench_batch", __doc__)
    add = parser.add_argument
    add_required_model(parser)
    add_questions(parser, "the first N of those that are left")
    parser.set_defaults(every=EVERY)
    add("--rows", type=int, default=8, metavar="N", help="of a batch; default: %(default)s")
    add("--max-tokens", type=int, metavar="N", help="of all rows together; default: no limit")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--methods", nargs="+", default=list(DEFAULTS), metavar="WAY", help="default: %(default)s")
    add_drafting(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
