"""A server with drafts and one without: the same questions to both of them, over HTTP.

    python -m eval.bench_server --model PATH --questions question.jsonl --max-new-tokens 64

Starts `transformers serve` and `selfspec serve`, each in a process of its own, and asks both for
greedy answers that are streamed, question by question. They take turns in going first. One question
that doesn't count warms them up. The last line is one JSON object.

Printed are medians of the seconds until the first text and until the end, the seconds of all
answers, and how many answers are the same. selfspec learns from one question to the next, as a
server does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from statistics import median
from typing import Any

from eval.benches.prompts import EVERY, load_questions
from eval.errors import EvalError, exit_status
from eval.methods.names import rotated
from eval.models.loading import load_tokenizer
from eval.options import (
    add_drafting,
    add_questions,
    add_required_model,
    checked_knobs,
    described,
    drafting_knobs,
)
from eval.report.tables import Table
from eval.runs.environment import short_name, versions
from eval.runs.served import OURS, STOCK, Reply, Served, arguments_of, serving

__all__ = ["main"]

Replies = dict[str, list[Reply]]  # By server, in the order of the questions.


def main(argv: Sequence[str] | None = None) -> int:
    """Asks both servers, and prints a table and the JSON line."""
    options = _options(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    knobs = checked_knobs(options)
    if options.max_new_tokens < 1:
        raise EvalError(f"--max-new-tokens must be >= 1 (got {options.max_new_tokens})")
    tokenizer = load_tokenizer(options.model)  # Too long questions are left out.
    questions = [each.turns[0] for each, _ in load_questions(options, tokenizer)]
    # Otherwise a SIGTERM would leave the servers behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        servers = [stack.enter_context(each) for each in _servers(options, knobs)]
        replies = _asked(servers, questions, options.max_new_tokens)
    print(f"\n{_table(replies).markdown()}")
    print(json.dumps(_told(options, replies)))
    return 0


def _servers(
    options: argparse.Namespace, knobs: dict[str, Any]
) -> list[AbstractContextManager[Served]]:
    shared = ["--device", options.device, "--dtype", options.dtype]
    arguments = {STOCK: shared, OURS: [*shared, *arguments_of(knobs)]}
    return [
        serving(name, options.model, more, threads=options.threads)
        for name, more in arguments.items()
    ]


def _asked(servers: Sequence[Served], questions: Sequence[str], max_new_tokens: int) -> Replies:
    for server in servers:
        server.ask(questions[0], min(max_new_tokens, 8))
    replies: Replies = {server.name: [] for server in servers}
    for number, question in enumerate(questions):
        for server in rotated(servers, number):
            replies[server.name].append(server.ask(question, max_new_tokens))
        seconds = ", ".join(f"{name} {found[-1].all:.2f} s" for name, found in replies.items())
        print(f"{number + 1} of {len(questions)}: {seconds}", flush=True)
    return replies


def _figures(replies: Replies) -> dict[str, dict[str, float]]:
    return {
        name: {
            "first_s": median(each.first for each in found),
            "answer_s": median(each.all for each in found),
            "all_s": sum(each.all for each in found),
        }
        for name, found in replies.items()
    }


def _num_same(replies: Replies) -> int:
    pairs = zip(replies[STOCK], replies[OURS], strict=True)
    return sum(stock.text == ours.text for stock, ours in pairs)


def _table(replies: Replies) -> Table:
    figures, number = _figures(replies), len(replies[STOCK])
    base = figures[STOCK]["all_s"]
    rows = [
        [name, *(f"{seconds:.2f}" for seconds in each.values()), f"{base / each['all_s']:.2f}"]
        for name, each in figures.items()
    ]
    head = ["server", "first text, s", "whole answer, s", "all answers, s", "speed-up"]
    note = f"Medians over {number} questions. {_num_same(replies)} answers are the same."
    return Table(f"{number} questions over HTTP", head, rows, note)


def _told(options: argparse.Namespace, replies: Replies) -> dict[str, Any]:
    return {
        "bench": "bench_server",
        "model": short_name(options.model),
        **versions(),
        "dtype": options.dtype,
        "threads": options.threads,
        "knobs": drafting_knobs(options),
        "max_new_tokens": options.max_new_tokens,
        "num_questions": len(replies[STOCK]),
        "num_same": _num_same(replies),
        "figures": _figures(replies),
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described("bench_server", __doc__)
    add = parser.add_argument
    add_required_model(parser)
    add_questions(parser, "the first N of those that are left")
    parser.set_defaults(every=EVERY)
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add_drafting(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
