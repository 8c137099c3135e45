"""What it brings that keys and values outlive a request: waits, with them and without.

    python -m eval bench_kept --model PATH --questions question.jsonl --dtype float32

Five things that users do, each with `kept_kv` as a server has it and with `kept_kv=0`, in turns:
several samples of one long prompt (`n`), a chat of six turns, and the questions themselves from
several clients, over HTTP; many prompts with one instruction, as in a file of prompts; and a chat
loop around `generate()`, also by stock. All other texts are made of the questions, and no two
rounds have a beginning in common. Printed are medians over the rounds; the last line is one JSON
object. On a machine that others use, `--cpu` counts the seconds of the processor in place of those
of the clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any

import psutil

import selfspec
from eval.benches.prompts import load_questions
from eval.methods.names import STOCK
from eval.models.loading import load_asked, load_tokenizer
from eval.options import EVERY, add_model, add_questions, check_at_least
from eval.report.table import Table
from eval.runs.environment import tell
from eval.runs.served import SELFSPEC, Served, check_chats, serving
from eval.runs.turns import in_turns

_KEPT, _READ = "kept", "read again"
_WHAT = ("samples", "chat", "clients", "file", "loop")
_NUM_TURNS = 6
# What was measured, by the way it was done: for each round some seconds.
Found = dict[str, dict[str, list[list[float]]]]
_COLUMNS = {
    "what": "{what}",
    "read again, s": "{read:.2f}",
    "kept, s": "{kept:.2f}",
    "times sooner": "{sooner:.2f}",
}


class Texts:
    """Texts of some number of tokens, of which no two begin alike."""

    def __init__(self, tokenizer: Any, questions: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        joined = "\n\n".join(questions)
        self._ids: Iterator[int] = cycle(tokenizer(joined, add_special_tokens=False)["input_ids"])
        self._number = 0

    def next(self, num_tokens: int) -> str:
        self._number += 1
        ids = list(islice(self._ids, num_tokens))
        return f"{self._number}. {self.tokenizer.decode(ids)}"


def run(options: argparse.Namespace) -> int:
    """Measures all, and prints a table and the JSON line."""
    check_at_least(options, 1, "rounds", "samples", "clients", "prompts")
    tokenizer = load_tokenizer(options.model)
    check_chats(tokenizer)
    questions = [question.turns[0] for question, _ in load_questions(options, tokenizer)]
    texts = Texts(tokenizer, questions)
    found: Found = {}
    if served := [what for what in ("samples", "chat", "clients") if what in options.what]:
        found |= _served(served, texts, questions, options)
    if "file" in options.what or "loop" in options.what:
        model = load_asked(options)
        ways = {
            "file": ([_KEPT, _READ], lambda name: _file(model, texts, options, name)),
            "loop": ([_KEPT, _READ, STOCK], lambda name: _loop(model, texts, options, name)),
        }
        for what, (names, measure) in ways.items():
            if what in options.what:
                found[what] = in_turns(names, options.rounds, measure, _shown, f"{what}, ")
    rows = list(_rows(found, options))
    print(f"\n{Table.of('Read once', _COLUMNS, rows, 'Medians over the rounds.').markdown()}")
    return tell("bench_kept", options, seconds=found, rows=rows)


def _served(
    served: Sequence[str], texts: Texts, questions: Sequence[str], options: argparse.Namespace
) -> Found:
    """What two servers take, of which one reads each prompt whole."""
    shared = ["--device", options.device, "--dtype", options.dtype]
    more = {_KEPT: shared, _READ: [*shared, "--kept-kv", "0"]}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                serving(SELFSPEC, options.model, own, threads=options.threads)
            )
            for name, own in more.items()
        }
        for server in servers.values():
            _wait(server, texts.next(20), 1, options)
        rounds = range(options.rounds)
        parts = {name: iter([questions[n :: options.rounds] for n in rounds]) for name in more}
        ways = {
            "samples": lambda name: [
                _wait(servers[name], texts.next(options.length), number, options)
                for number in (1, options.samples)
            ],
            "chat": lambda name: _chat(servers[name], texts, options),
            "clients": lambda name: _clients(servers[name], next(parts[name]), options),
        }
        return {
            what: in_turns(list(more), options.rounds, ways[what], _shown, f"{what}, ")
            for what in served
        }


def _clock(options: argparse.Namespace, pid: int | None = None) -> Callable[[], float]:
    """The clock, or what a process has taken of the processor."""
    process = psutil.Process(pid)
    return (lambda: sum(process.cpu_times()[:2])) if options.cpu else perf_counter


def _wait(server: Served, text: str, samples: int, options: argparse.Namespace) -> float:
    """Seconds for some samples of one token."""
    now = _clock(options, server.pid)
    start = now()
    server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": text}],
        max_tokens=1,
        n=samples,
    )
    return now() - start


def _chat(server: Served, texts: Texts, options: argparse.Namespace) -> list[float]:
    """Seconds to the first text of each turn."""
    now = _clock(options, server.pid)
    messages = [{"role": "user", "content": texts.next(options.length)}]
    seconds = []
    for _ in range(_NUM_TURNS):
        start, first, parts = now(), None, []
        create = server.client.chat.completions.create
        asked = {"max_tokens": options.max_new_tokens, "temperature": 0, "stream": True}
        with create(model=server.model, messages=messages, **asked) as stream:
            for chunk in stream:
                if chunk.choices and (text := chunk.choices[0].delta.content):
                    first = now() - start if first is None else first
                    parts.append(text)
        seconds.append(now() - start if first is None else first)
        messages += [
            {"role": "assistant", "content": "".join(parts)},
            {"role": "user", "content": texts.next(options.question)},
        ]
    return seconds


def _clients(server: Served, questions: Sequence[str], options: argparse.Namespace) -> list[float]:
    """Seconds until several clients, who take one question after the other, have all answers."""
    now = _clock(options, server.pid)
    start = now()
    with ThreadPoolExecutor(options.clients) as clients:
        list(clients.map(lambda text: server.ask(text, options.max_new_tokens), questions))
    return [now() - start]


def _file(model: Any, texts: Texts, options: argparse.Namespace, name: str) -> list[float]:
    """Seconds for prompts that all begin with one instruction."""
    spec = selfspec.SelfSpec(kept_kv="25%" if name == _KEPT else 0)
    instruction = texts.next(options.instruction)
    asked = [f"{instruction}\n\n{texts.next(options.question)}" for _ in range(options.prompts)]
    now = _clock(options)
    start = now()
    for answer in selfspec.generate_many(
        model, texts.tokenizer, asked, assistant=spec, max_new_tokens=options.max_new_tokens
    ):
        assert answer.error is None
    return [now() - start]


def _loop(model: Any, texts: Texts, options: argparse.Namespace, name: str) -> list[float]:
    """Seconds for each turn of a chat with `generate()`, which gets the whole history."""
    now = _clock(options)
    own = {STOCK: None, _KEPT: "25%", _READ: 0}[name]
    spec = None if name == STOCK else selfspec.SelfSpec(kept_kv=own)
    messages = [{"role": "user", "content": texts.next(options.length)}]
    seconds = []
    for _ in range(_NUM_TURNS):
        inputs = texts.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        start = now()
        ids = model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, assistant=spec
        )
        seconds.append(now() - start)
        said = texts.tokenizer.decode(
            ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": texts.next(options.question)},
        ]
    return seconds


def _rows(found: Found, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    def row(what: str, read: float, kept: float) -> dict[str, Any]:
        return {"what": what, "read": read, "kept": kept, "sooner": read / kept}

    def medians(what: str, name: str) -> list[float]:
        return [median(each) for each in zip(*found[what][name], strict=True)]

    if "samples" in found:
        for place, number in enumerate((1, options.samples)):
            both = (medians("samples", name)[place] for name in (_READ, _KEPT))
            yield row(f"{number} samples of {options.length} tokens", *both)
    if "chat" in found:
        first, *later = zip(medians("chat", _READ), medians("chat", _KEPT), strict=True)
        yield row("first text of a chat's turn 1", *first)
        yield row("of turns 2 to 6", *(median(each) for each in zip(*later, strict=True)))
    if "clients" in found:
        both = (medians("clients", name)[0] for name in (_READ, _KEPT))
        yield row(f"{options.clients} clients with questions of their own", *both)
    if "file" in found:
        both = (medians("file", name)[0] for name in (_READ, _KEPT))
        yield row(f"{options.prompts} prompts with one instruction", *both)
    if "loop" in found:
        kept, read, stock = (sum(medians("loop", name)) for name in (_KEPT, _READ, STOCK))
        yield row("chat loop", read, kept)
        yield row("the same, by stock", stock, kept)


def _shown(seconds: Sequence[float]) -> str:
    return ", ".join(f"{time:.2f}" for time in seconds) + " s"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, required=True, dtype="float32", device="cpu")
    add_questions(parser, "the first N of those that are left", every=EVERY)
    add("--length", type=int, default=880, metavar="N", help="tokens of a long prompt")
    add("--samples", type=int, default=8, metavar="N", help="samples of one prompt")
    add("--clients", type=int, default=8, metavar="N", help="clients with questions of their own")
    add("--prompts", type=int, default=40, metavar="N", help="prompts with one instruction")
    add("--instruction", type=int, default=500, metavar="N", help="its tokens")
    add("--question", type=int, default=60, metavar="N", help="tokens of each further question")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="of each answer")
    add("--what", nargs="+", choices=_WHAT, default=_WHAT, help="default: all of them")
    add("--cpu", action="store_true", help="seconds of the processor")
    add("--rounds", type=int, default=2, metavar="N", help="default: %(default)s")
