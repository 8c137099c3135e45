"""A server under load: many clients that ask, stream, wait, and go away in the midst of an answer.

    python -m eval load_server --clients 50 --seconds 600

Starts `selfspec serve` with the embedded model, or with --model, in a process of its own. Each
client asks over and over, sampled or greedily, streamed or not, and leaves every fourth answer. A
text that comes to its end is compared with that of `generate()` alone. Meanwhile the server's
memory, threads and open files are noted. The last line is one JSON object. The exit status is 1 if
a text was another one, if a request failed, or if a row was left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

import psutil
import torch

from eval.models.loading import load_model, load_tokenizer
from eval.options import check_at_least
from eval.runs.environment import told
from eval.runs.served import OURS, Served, serving
from selfspec.serving.schema import choice_of

_PROMPTS = ("def read(self", "class Queue:\n", "import os\n\n", "for name in", "return [", "if x ")
_LENGTHS = (4, 16, 48)
_NOTE_EVERY = 2.0  # Seconds.


class Ask(NamedTuple):
    """A request, and the text that `generate()` writes alone."""

    body: dict[str, Any]
    expected: str


@dataclass
class Load:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str, problem: str | None = None) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            if problem is not None:
                self.problems.append(problem[:300])


class Size(NamedTuple):
    """What the server's process takes."""

    megabytes: float
    num_threads: int
    num_files: int


def run(options: argparse.Namespace) -> int:
    """Loads a server, and prints what came of it."""
    check_at_least(options, 1, "clients", "seconds")
    asks = _asks(options.model)
    more = ["--dtype", "float32", "--max-waiting", str(options.clients)]
    with serving(OURS, options.model, more, threads=options.threads) as server:
        load, sizes = Load(), []
        end = monotonic() + options.seconds
        with ThreadPoolExecutor(options.clients) as clients:
            for number in range(options.clients):
                clients.submit(_client, server, asks, number, end, load)
            process = psutil.Process(server.pid)
            while monotonic() < end:
                sizes.append(_size(process))
                sleep(_NOTE_EVERY)
        left = _left_behind(server)
    third = max(len(sizes) // 3, 1)
    found = {
        "requests": dict(load.outcomes),
        "problems": load.problems[:5],
        "num_left_behind": left,
        "most_in_first_third": _most(sizes[:third]),
        "most_in_last_third": _most(sizes[-third:]),
    }
    print(json.dumps(told("load_server", options, **found)))
    return int(bool(load.problems or left))


def _asks(model: str) -> list[Ask]:
    """Requests of several kinds, with the texts that stock's own calls give."""
    tokenizer, loaded = load_tokenizer(model), load_model(model, dtype="float32", device="cpu")
    asks = []
    for seed, prompt in enumerate(_PROMPTS):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        for length in _LENGTHS:
            for temperature in (0, 0.8):
                torch.manual_seed(seed)
                output = loaded.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=length,
                    **choice_of(temperature),
                )
                text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
                asked = {"prompt": prompt, "max_tokens": length, "temperature": temperature}
                asks.append(Ask({**asked, "seed": seed}, text))
    return asks


def _client(server: Served, asks: Sequence[Ask], number: int, end: float, load: Load) -> None:
    """Asks until the time is over; what goes wrong is noted."""
    dice = random.Random(number)
    while monotonic() < end:
        ask, leaves = dice.choice(asks), dice.random() < 0.25
        try:
            text = _text(server, ask, dice, leaves=leaves)
        except Exception as error:
            load.count("failed", f"{type(error).__name__}: {error}")
            continue
        if text is None:
            load.count("left")
        elif text == ask.expected:
            load.count("right")
        else:
            load.count("wrong", f"{ask.body}: {text!r} instead of {ask.expected!r}")


def _text(server: Served, ask: Ask, dice: random.Random, *, leaves: bool) -> str | None:
    """The text of an answer; None if the client left before its end."""
    create = server.client.completions.create
    if dice.random() < 0.5 and not leaves:
        return str(create(model=server.model, **ask.body).choices[0].text)
    parts, most = [], dice.randrange(3)
    with create(model=server.model, stream=True, **ask.body) as stream:
        for count, chunk in enumerate(stream):
            if leaves and count == most:
                return None
            parts.append(chunk.choices[0].text)
    return "".join(parts)


def _left_behind(server: Served) -> int:
    """How many texts the server still writes when all clients have gone, after a moment."""
    for _ in range(50):
        stats = server.stats()["server"]
        left = int(stats["num_running"] + stats["num_waiting"])
        if not left:
            break
        sleep(0.1)
    return left


def _size(process: psutil.Process) -> Size:
    return Size(process.memory_info().rss / 1e6, process.num_threads(), process.num_fds())


def _most(sizes: Sequence[Size]) -> dict[str, float]:
    return {name: round(max(getattr(size, name) for size in sizes), 1) for name in Size._fields}


def add_options(parser: argparse.ArgumentParser) -> None:
    from selfspec.cli.shared.model_loading import TINY

    add = parser.add_argument
    add("--model", default=str(TINY), help="a folder or a Hub id; default: the embedded model")
    add("--clients", type=int, default=50, metavar="N", help="default: %(default)s")
    add("--seconds", type=float, default=60, metavar="S", help="default: %(default)s")
    add("--threads", type=int, metavar="N", help="of the server; default: torch's")
