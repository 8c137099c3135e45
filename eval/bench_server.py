"""Servers under several clients at once: the same questions to each of them, over HTTP.

    python -m eval bench_server --model PATH --questions question.jsonl --clients 1 8

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from eval.benches.prompts import EVERY, load_questions
from eval.errors import EvalError
from eval.methods.names import rotated
from eval.models.loading import load_tokenizer
from eval.options import (
    add_drafting,
    add_questions,
    add_required_model,
    check_at_least,
    checked_knobs,
)
from eval.report.table import Table
from eval.runs.environment import told
from eval.runs.served import METHODS, OURS, STOCK, Reply, Served, arguments_of, serving


class Round(NamedTuple):
    """What one server did for so many clients."""

    replies: list[Reply]  # In the order of the questions.
    seconds: float

    def figures(self, tokenizer: Any) -> dict[str, float]:
        num_tokens = sum(len(tokenizer(reply.text)["input_ids"]) for reply in self.replies)
        firsts = sorted(reply.first for reply in self.replies)
        return {
            "tokens_per_s": num_tokens / self.seconds,
            "first_s": median(firsts),
            "first_95_s": firsts[int(0.95 * (len(firsts) - 1) + 0.5)],
            "answer_s": median(reply.all for reply in self.replies),
            "all_s": self.seconds,
        }


_COLUMNS = {
    "clients": "{clients}",
    "server": "{server}",
    "tokens/s": "{tokens_per_s:.1f}",
    "speed-up": "{gain:.2f}",
    "first text, s": "{first_s:.2f}",
    "95 %": "{first_95_s:.2f}",
    "answer, s": "{answer_s:.2f}",
    "same": "{num_same}",
}
Rounds = dict[tuple[int, str], Round]  # By the number of clients and the server.


def run(options: argparse.Namespace) -> int:
    """Asks all servers, and prints a table and the JSON line."""
    knobs = checked_knobs(options)
    check_at_least(options, 1, "max_new_tokens", "clients")
    tokenizer = load_tokenizer(options.model)  # Too long questions are left out.
    questions = [each.turns[0] for each, _ in load_questions(options, tokenizer)]
    own = _divided(questions, len(options.clients))
    # Otherwise a SIGTERM would leave the servers behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        servers = [stack.enter_context(each) for each in _servers(options, knobs)]
        rounds = _asked(servers, own, options)
    rows = [
        {
            "clients": num_clients,
            "server": name,
            "num_same": _num_same(rounds, num_clients, name),
            **found.figures(tokenizer),
        }
        for (num_clients, name), found in rounds.items()
    ]
    number = len(next(iter(rounds.values())).replies)
    print(f"\n{_table(rows, number).markdown()}")
    found = {"knobs": knobs, "num_questions": number, "rounds": rows}
    print(json.dumps(told("bench_server", options, **found)))
    return 0


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
    servers: Sequence[Served], own: Sequence[Sequence[str]], options: argparse.Namespace
) -> Rounds:
    """What all servers did, each round with questions of its own."""
    for server in servers:
        server.ask(own[0][0], min(options.max_new_tokens, 8))
    rounds: Rounds = {}
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


def _table(rows: Sequence[dict[str, Any]], num_questions: int) -> Table:
    stock = {row["clients"]: row["all_s"] for row in rows if row["server"] == STOCK}
    cells = [
        {**row, "gain": stock[row["clients"]] / row["all_s"] if stock else None}
        for row in sorted(rows, key=lambda row: row["clients"])
    ]
    note = f"Medians over {num_questions} questions in each round."
    return Table.of(f"{num_questions} questions over HTTP", _COLUMNS, cells, note)


def add_options(parser: argparse.ArgumentParser) -> None:
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
