"""Servers side by side: how they are started, asked and ended.

Knows commands, addresses and messages; nothing of questions or tables.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import IO, Any, NamedTuple

from eval.errors import EvalError, last_line

TRANSFORMERS, SELFSPEC = "transformers", "selfspec"
SERVERS = (TRANSFORMERS, "continuous", "plain", SELFSPEC)

_HOST = "127.0.0.1"
_PATIENCE = 10  # Seconds that a server has to end by itself.
_TRANSFORMERS = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
_SELFSPEC = [sys.executable, "-m", "selfspec", "serve"]
_PROGRAMS = {  # What stands in front of the model's name, and after it.
    TRANSFORMERS: (_TRANSFORMERS, []),
    "continuous": (_TRANSFORMERS, ["--continuous-batching"]),
    "plain": (_SELFSPEC, ["--max-nodes", "1"]),
    SELFSPEC: (_SELFSPEC, []),
}


class Reply(NamedTuple):
    """One answer, and when it came, in seconds since it was asked for."""

    text: str
    first: float
    all: float


class Served(NamedTuple):
    """A server that listens."""

    name: str
    model: str
    client: Any  # of OpenAI
    url: str
    pid: int

    def ask(self, prompt: str, max_new_tokens: int, *, leaves: bool = False) -> Reply | None:
        """Asks for a greedy answer, streamed; None if the client leaves after its first text."""
        start, first, parts = perf_counter(), None, []
        asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_new_tokens}
        create = self.client.chat.completions.create
        with create(model=self.model, temperature=0, stream=True, **asked) as stream:
            for chunk in stream:
                text = chunk.choices[0].delta.content if chunk.choices else None
                if text:
                    first = perf_counter() - start if first is None else first
                    parts.append(text)
                    if leaves:
                        return None
        end = perf_counter() - start
        return Reply("".join(parts), end if first is None else first, end)

    def left_behind(self) -> int | None:
        """How many texts selfspec's server still writes, after a moment; None of another one."""
        if _PROGRAMS[self.name][0] is not _SELFSPEC:
            return None
        left = 0
        for _ in range(50):
            with urllib.request.urlopen(f"{self.url}/selfspec/stats", timeout=_PATIENCE) as answer:
                stats = json.load(answer)["server"]
            if not (left := int(stats["num_running"] + stats["num_waiting"])):
                break
            sleep(0.1)
        return left


def arguments_of(knobs: Mapping[str, Any]) -> list[str]:
    """Knobs as the options of a command.

    >>> arguments_of({"max_nodes": 8, "learning": "request"})
    ['--max-nodes', '8', '--learning', 'request']
    """
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in knobs.items()]
    return [part for pair in pairs for part in pair]


def check_chats(tokenizer: Any) -> None:
    """Refuses a model that no server can answer a chat with."""
    if not tokenizer.chat_template:
        raise EvalError("--model must have a chat template, since servers get chats (got none)")


@contextmanager
def serving(
    name: str, model: str, more: Sequence[str], *, threads: int | None = None
) -> Iterator[Served]:
    """Inside, the server of that name answers, in a process of its own.

    `more` are options of its command.
    """
    try:
        from openai import OpenAI
    except ImportError as error:
        raise EvalError(f"{name!r} needs more packages: pip install openai fastapi") from error
    port = _free_port()
    listen = ["--host", _HOST, "--port", str(port)]
    program, own_options = _PROGRAMS[name]
    own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*program, model, *listen, *own_options, *more],
            env={**os.environ, **own},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(name, process, port, said)
            url = f"http://{_HOST}:{port}"
            with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                yield Served(name, model, client, url, process.pid)
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _wait(name: str, process: subprocess.Popen[bytes], port: int, said: IO[str]) -> None:
    """Until the server listens. If it ends instead, its last line says why."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{_HOST}:{port}/health", timeout=_PATIENCE):
                return
        except OSError:
            sleep(0.1)
    said.seek(0)
    raise EvalError(f"{name!r} did not start: {last_line(said.read())}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
