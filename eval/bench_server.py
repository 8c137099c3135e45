"""Servers under several clients at once: the same questions to each of them, over HTTP.

    python -m eval bench_server --model PATH --questions question.jsonl --clients 1 8

Starts `transformers serve` and `selfspec serve`, each in a process of its own. The clients ask for
greedy answers that are streamed; each takes the next question as soon as its answer is
complete. Each number of clients has questions of its own, which all servers are asked in turns. One
question that doesn't count warms them up. With --methods, "plain" is `selfspec serve` without
drafts, and "continuous" is `transformers serve --continuous-batching`. The last line is one JSON
object.

Printed are new tokens a second over all answers, the seconds until the first text (median and 95th
percentile) and until the end (median), how many answers are those of `transformers serve`, and the
server's memory. selfspec learns from one question to the next, as a server does. With --leaving
0.25, clients go away in the midst of every fourth answer, which then doesn't count; "left behind"
is what selfspec's server still writes a moment after the last client has gone.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import psutil

from eval.benches.prompts import load_questions
from eval.errors import EvalError
from eval.methods.names import rotated
from eval.models.loading import load_tokenizer
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
from eval.runs.served import (
    SELFSPEC,
    SERVERS,
    TRANSFORMERS,
    Reply,
    Served,
    arguments_of,
    check_chats,
    serving,
)

_COLUMNS = {
    "clients": "{clients}",
    "server": "{server}",
    "tokens/s": "{tokens_per_s:.1f}",
    "speed-up": "{speed_up:.2f}",
    "first text, s": "{first_s:.2f}",
    "95 %": "{first_95_s:.2f}",
    "answer, s": "{answer_s:.2f}",
    "same": "{num_same}",
    "memory, MB": "{memory_bytes!m:.0f}",
    "left behind": "{num_left_behind}",
}


class Round(NamedTuple):
    """What one server did for so many clients."""

    replies: list[Reply | None]  # In the order of the questions; None where the client left.
    seconds: float
    memory_bytes: int
    num_left_behind: int | None  # None where the server doesn't say.

    def figures(self, tokenizer: Any, stock: Round | None) -> dict[str, Any]:
        """What is printed of it, beside what transformers' server did for as many clients."""
        whole = [reply for reply in self.replies if reply is not None]
        if not whole:
            raise EvalError("--leaving must let an answer be complete (got none); ask more")
        firsts = sorted(reply.first for reply in whole)
        return {
            "tokens_per_s": sum(len(tokenizer(r.text)["input_ids"]) for r in whole) / self.seconds,
            "speed_up": None if stock is None else stock.seconds / self.seconds,
            "first_s": median(firsts),
            "first_95_s": firsts[int(0.95 * (len(firsts) - 1) + 0.5)],
            "answer_s": median(reply.all for reply in whole),
            "all_s": self.seconds,
            "num_same": None if stock is None else self._num_same(stock),
            "memory_bytes": self.memory_bytes,
            "num_left_behind": self.num_left_behind,
        }

    def _num_same(self, stock: Round) -> int:
        pairs = zip(stock.replies, self.replies, strict=True)
        return sum(_whole(a.text) == _whole(b.text) for a, b in pairs if a and b)


def run(options: argparse.Namespace) -> int:
    """Asks all servers, and prints a table and the JSON line."""
    knobs = checked_knobs(options)
    check_at_least(options, 1, "max_new_tokens", "clients")
    tokenizer = load_tokenizer(options.model)  # Too long questions are left out.
    check_chats(tokenizer)
    questions = [question.turns[0] for question, _ in load_questions(options, tokenizer)]
    own = _divided(questions, len(options.clients))
    # Otherwise a SIGTERM would leave the servers behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shared = ["--device", options.device, "--dtype", options.dtype]
    with ExitStack() as stack:
        servers = []
        for name in options.methods:
            more = [*shared, *arguments_of(knobs)] if name == SELFSPEC else shared
            server = serving(name, options.model, more, threads=options.threads)
            servers.append(stack.enter_context(server))
        rounds = _asked(servers, own, options)
    rows = [
        {"clients": n, "server": name, **found.figures(tokenizer, rounds.get((n, TRANSFORMERS)))}
        for (n, name), found in rounds.items()
    ]
    title = f"{len(own[0])} questions over HTTP"
    note = f"Medians over {len(own[0])} questions in each round."
    by_clients = sorted(rows, key=lambda row: row["clients"])
    print(f"\n{Table.of(title, _COLUMNS, by_clients, note).telling().markdown()}")
    found = {"knobs": knobs, "num_questions": len(own[0]), "rounds": rows}
    return tell("bench_server", options, **found)


def _asked(
    servers: Sequence[Served], own: Sequence[Sequence[str]], options: argparse.Namespace
) -> dict[tuple[int, str], Round]:
    """What all servers did, each round with questions of its own."""
    for server in servers:
        server.ask(own[0][0], min(options.max_new_tokens, 8))
    rounds = {}
    for number, num_clients in enumerate(options.clients):
        for server in rotated(servers, number):
            found = _round(server, own[number], num_clients, options)
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
    server: Served, questions: Sequence[str], num_clients: int, options: argparse.Namespace
) -> Round:
    """Each client takes the next question when its answer is complete."""

    def ask(number: int) -> Reply | None:
        leaves = int((number + 1) * options.leaving) > int(number * options.leaving)
        return server.ask(questions[number], options.max_new_tokens, leaves=leaves)

    start = perf_counter()
    with ThreadPoolExecutor(num_clients) as clients:
        replies = list(clients.map(ask, range(len(questions))))
    seconds = perf_counter() - start
    memory = psutil.Process(server.pid).memory_info().rss
    return Round(replies, seconds, memory, server.left_behind())


def _whole(text: str) -> str:
    """A text without half a character at its end, of which transformers' server says nothing."""
    return text.rstrip("\ufffd")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, required=True, dtype="float32", device="cpu")
    limit = "the first N of those that are left, for all rounds together"
    add_questions(parser, limit, every=EVERY)
    add_length(parser, 64)
    clients = "how many clients ask at once; one round for each number (default: 1)"
    add("--clients", type=int, nargs="+", default=[1], metavar="N", help=clients)
    names = "default: transformers and selfspec"
    add("--methods", nargs="+", choices=SERVERS, default=[TRANSFORMERS, SELFSPEC], help=names)
    leaving = "of all answers, the share that clients leave in the midst; default: 0"
    add("--leaving", type=float, default=0.0, metavar="SHARE", help=leaving)
    add_drafting(parser)
