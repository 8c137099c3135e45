"""Servers under several clients at once: the same questions to each of them, over HTTP.

    python -m eval.bench_server --model PATH --questions question.jsonl --clients 1 8

Starts `transformers serve` and `selfspec serve`, each in a process of its own. So many clients ask
for greedy answers that are streamed; each takes the next question as soon as its answer is
complete. Each number of clients has questions of its own, which all servers are asked in turns. One
question that doesn't count warms them up. With --methods, "plain" is `selfspec serve` without
drafts, and "continuous" is `transformers serve --continuous-batching`. The last line is one JSON
object.

Printed are new tokens a second over all answers, the seconds until the first text (median and 95th
percentile) and until the end (median), and how many answers are those of `transformers serve`.
selfspec learns from one question to the next, as a server does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

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
from eval.runs.served import METHODS, OURS, STOCK, Reply, Served, arguments_of, serving

__all__ = ["main"]


class Round(NamedTuple):
    """What one server did for so many clients."""

    replies: list[Reply]  # In the order of the questions.
    seconds: float

    def figures(self, tokenizer: Any) -> dict[str, float]:
        """Tokens a second, and how long clients waited."""
        num_tokens = sum(len(tokenizer(reply.text)["input_ids"]) for reply in self.replies)
        firsts = sorted(reply.first for reply in self.replies)
        return {
            "tokens_per_s": num_tokens / self.seconds,
            "first_s": median(firsts),
            "first_95_s": firsts[int(0.95 * (len(firsts) - 1) + 0.5)],
            "answer_s": median(reply.all for reply in self.replies),
            "all_s": self.seconds,
        }


Rounds = dict[tuple[int, str], Round]  # By the number of clients and the server.


def main(argv: Sequence[str] | None = None) -> int:
    """Asks all servers, and prints a table and the JSON line."""
    options = _options(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    knobs = checked_knobs(options)
    _check(options)
    tokenizer = load_tokenizer(options.model)  # Too long questions are left out.
    questions = [each.turns[0] for each, _ in load_questions(options, tokenizer)]
    # Otherwise a SIGTERM would leave the servers behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        servers = [stack.enter_context(each) for each in _servers(options, knobs)]
        rounds = _asked(servers, questions, options)
    print(f"\n{_table(rounds, tokenizer).markdown()}")
    print(json.dumps(_told(options, rounds, tokenizer)))
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.max_new_tokens < 1:
        raise EvalError(f"--max-new-tokens must be >= 1 (got {options.max_new_tokens})")
    if min(options.clients) < 1:
        raise EvalError(f"--clients must be >= 1 (got {min(options.clients)})")


def _servers(
    options: argparse.Namespace, knobs: dict[str, Any]
) -> list[AbstractContextManager[Served]]:
    shared = ["--device", options.device, "--dtype", options.dtype]
    ours = [*shared, *arguments_of(knobs)]
    return [
        serving(name, options.model, ours if name == OURS else shared, threads=options.threads)
        for name in options.methods
    ]


def _asked(
    servers: Sequence[Served], questions: Sequence[str], options: argparse.Namespace
) -> Rounds:
    for server in servers:
        server.ask(questions[0], min(options.max_new_tokens, 8))
    rounds: Rounds = {}
    own = _divided(questions, len(options.clients))
    for number, num_clients in enumerate(options.clients):
        for server in rotated(servers, number):
            found = _round(server, own[number], options.max_new_tokens, num_clients)
            rounds[num_clients, server.name] = found
            print(f"{num_clients} clients, {server.name}: {found.seconds:.1f} s", flush=True)
    return rounds


def _divided(questions: Sequence[str], num_rounds: int) -> list[Sequence[str]]:
    """Questions of all tasks for each round; none has one that drafts know from another round."""
    each = len(questions) // num_rounds
    if not each:
        raise EvalError(
            f"--clients must name at most {len(questions)} rounds, one for each question "
            f"(got {num_rounds})"
        )
    return [questions[n::num_rounds][:each] for n in range(num_rounds)]


def _round(
    server: Served, questions: Sequence[str], max_new_tokens: int, num_clients: int
) -> Round:
    """Each client takes the next question when its answer is complete."""
    start = perf_counter()
    with ThreadPoolExecutor(num_clients) as clients:
        replies = list(clients.map(lambda each: server.ask(each, max_new_tokens), questions))
    return Round(replies, perf_counter() - start)


def _num_same(rounds: Rounds, num_clients: int, name: str) -> int | None:
    """How many answers are those of transformers' server; None if that was not asked."""
    base = rounds.get((num_clients, STOCK))
    if base is None:
        return None
    pairs = zip(base.replies, rounds[num_clients, name].replies, strict=True)
    return sum(_whole(stock.text) == _whole(ours.text) for stock, ours in pairs)


def _whole(text: str) -> str:
    """A text without half a character at its end, of which transformers' server says nothing."""
    return text.rstrip("\ufffd")


def _table(rounds: Rounds, tokenizer: Any) -> Table:
    rows = []
    for (num_clients, name), found in sorted(rounds.items(), key=lambda each: each[0][0]):
        figures = found.figures(tokenizer)
        base = rounds.get((num_clients, STOCK))
        gain = "" if base is None else f"{base.seconds / found.seconds:.2f}"
        rest = [f"{figures[key]:.2f}" for key in ("first_s", "first_95_s", "answer_s")]
        same = "" if base is None else str(_num_same(rounds, num_clients, name))
        rows.append([str(num_clients), name, f"{figures['tokens_per_s']:.1f}", gain, *rest, same])
    head = ["clients", "server", "tokens/s", "speed-up", "first text, s", "95 %", "answer, s"]
    head.append("same")
    number = len(next(iter(rounds.values())).replies)
    note = f"Medians over {number} questions in each round."
    return Table(f"{number} questions over HTTP", head, rows, note)


def _told(options: argparse.Namespace, rounds: Rounds, tokenizer: Any) -> dict[str, Any]:
    return {
        "bench": "bench_server",
        "model": short_name(options.model),
        **versions(),
        "dtype": options.dtype,
        "threads": options.threads,
        "knobs": drafting_knobs(options),
        "max_new_tokens": options.max_new_tokens,
        "num_questions": len(next(iter(rounds.values())).replies),
        "rounds": [
            {
                "clients": num_clients,
                "server": name,
                "num_same": _num_same(rounds, num_clients, name),
                **found.figures(tokenizer),
            }
            for (num_clients, name), found in rounds.items()
        ],
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described("bench_server", __doc__)
    add = parser.add_argument
    add_required_model(parser)
    add_questions(parser, "the first N of those that are left, for all rounds together")
    parser.set_defaults(every=EVERY)
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add(
        "--clients",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="how many clients ask at once; one round for each number (default: 1)",
    )
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=[STOCK, OURS],
        help="default: transformers and selfspec",
    )
    add_drafting(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
