"""`selfspec serve`: what a client of OpenAI gets is what transformers' own server says."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra: pip install 'selfspec[serve]'")
pytest.importorskip("openai", reason="needs the extra: pip install 'selfspec[test]'")

import openai
import uvicorn
from transformers.cli.serve import Serve

from selfspec.cli import serve
from selfspec.cli.shared.options import DraftOptions
from selfspec.config import SpecConfig
from tests.waiting import PATIENCE, free_port, wait_until

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
NO_END = {"logit_bias": {"1": -100.0}}  # The text never ends by itself.
KEY = "a secret"


@contextmanager
def running(server: Any, run: Callable[[], None], port: int) -> Iterator[Any]:
    """Inside, a server of uvicorn answers on a thread; yields a client."""
    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        with client_of(port) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


def client_of(port: int, api_key: str = KEY) -> Any:
    base_url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=PATIENCE)


class Unstarted(Serve):
    """transformers' server without us."""

    def start_server(self) -> None:
        """`running` does."""


@pytest.fixture(scope="module")
def stock(chat_folder: str) -> Iterator[Any]:
    port = free_port()
    options = {"host": "127.0.0.1", "port": port, "device": "cpu", "dtype": "float32"}
    server = Unstarted(force_model=chat_folder, non_blocking=True, **options).server
    with running(server, server.run, port) as client:
        yield client


@pytest.fixture(scope="module")
def client(chat_folder: str) -> Iterator[Any]:
    """Of the command's own server, but for its signals."""
    access = serve.Access(host="127.0.0.1", port=free_port(), api_key=KEY)
    asked = DraftOptions(model=chat_folder, dtype="float32")
    config = SpecConfig(max_nodes=8, budget="fixed")
    model = serve._model_thread(asked, serve.Load(), config)
    model.start()
    app = serve._application(model, chat_folder, access)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=access.port))
    with running(server, lambda: asyncio.run(server.serve()), access.port) as client:
        yield client


def chat(client: Any, model: str, **extra: Any) -> str:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **extra}
    answer = client.chat.completions.create(**asked)
    if not extra.get("stream"):
        return str(answer.choices[0].message.content)
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def complete(client: Any, model: str, **extra: Any) -> str:
    asked = {"model": model, "prompt": "def read(", "max_tokens": 24, "temperature": 0, **extra}
    answer = client.completions.create(**asked)
    if not extra.get("stream"):
        return str(answer.choices[0].text)
    return "".join(chunk.choices[0].text for chunk in answer if chunk.choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, complete])
def test_answers_are_those_of_transformers(
    ask: Any, stream: bool, client: Any, stock: Any, chat_folder: str
) -> None:
    expected = ask(stock, chat_folder, stream=stream)
    assert expected
    assert ask(client, chat_folder, stream=stream) == expected


def test_several_clients_at_once(client: Any, chat_folder: str) -> None:
    asked = [
        (chat, {"stream": True}),
        (complete, {}),
        (chat, {"temperature": 1, "seed": 3}),
        (complete, {"max_tokens": 3}),
    ] * 2
    alone = [ask(client, chat_folder, **extra) for ask, extra in asked]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ask, client, chat_folder, **extra) for ask, extra in asked]
        assert [future.result(PATIENCE) for future in futures] == alone


def test_refusals_are_errors_of_the_client(client: Any, chat_folder: str) -> None:
    with pytest.raises(openai.NotFoundError, match="the one that this server answers with"):
        chat(client, "no/such-model")
    with pytest.raises(openai.BadRequestError, match="unknown field 'nonsense'"):
        chat(client, chat_folder, extra_body={"nonsense": 1})
    with pytest.raises(openai.AuthenticationError):
        chat(client.with_options(api_key="another"), chat_folder)


def test_a_model_that_is_none(fails, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "can't be loaded" in fails("serve", tmp_path, "--port", free_port())


def test_a_port_in_use(fails, chat_folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = fails("serve", chat_folder, "--host", "127.0.0.1", "--port", port)
    assert f"--port must be free at 127.0.0.1 (got {port}: Address already in use)" in said
    assert "--host must be" in fails("serve", chat_folder, "--host", "no host")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--api-key", " "), "--api-key must not be empty"),
        (("--allow-origin", "example.org"), "--allow-origin must be a scheme and a host"),
        (("--allow-origin", "https://example.org/"), "--allow-origin must be a scheme and a host"),
        (("--max-kv-memory", "much"), "--max-kv-memory must be"),
        (("--budget", "endless"), "budget"),
        (("--budget", "fitted"), "--budget"),
        (("--port", "70000"), "--port"),
    ],
)
def test_options_that_can_not_be(fails, chat_folder: str, wrong: tuple[str, ...], said) -> None:
    assert said in fails("serve", chat_folder, "--port", free_port(), *wrong)


def test_within_a_memory(fails, chat_folder: str) -> None:
    """Keys and values get what the model leaves."""
    asked = DraftOptions(model=chat_folder, dtype="float32", max_memory="3MB")
    answering = serve._model_thread(asked, serve.Load(max_rows=3), SpecConfig())
    weights = sum(4 * each.numel() for each in answering.model.parameters())
    assert answering.max_memory == 3_000_000 - weights
    assert "must be a number of bytes" in fails("serve", chat_folder, "--max-memory", "lots")
    line = fails("serve", chat_folder, "--port", free_port(), "--max-kv-memory", "1KB")
    assert "--max-kv-memory must be at least " in line


def test_a_wide_address_is_warned_of() -> None:
    assert not serve.Access().is_wide
    assert not serve.Access(host="127.0.0.1").is_wide
    assert not serve.Access(host="::1").is_wide
    for host in ("0.0.0.0", "::", "192.168.1.7", "box.example.org"):
        assert serve.Access(host=host).is_wide
    assert "set SELFSPEC_API_KEY" in serve._warning(serve.Access(host="0.0.0.0"))
    assert "unencrypted" in serve._warning(serve.Access(host="0.0.0.0", api_key=KEY))


def test_without_the_extra_the_command_names_it(fails, monkeypatch, chat_folder: str) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    said = fails("serve", chat_folder, "--port", free_port())
    assert "pip install fastapi prometheus-client uvicorn" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_in_the_midst_of_an_answer(
    number: signal.Signals, status: int, chat_folder: str, tmp_path: Path
) -> None:
    """It ends soon, says so, and keeps what it learned."""
    port, memory = free_port(), tmp_path / "memory"
    command = [sys.executable, "-m", "selfspec.cli", "serve", chat_folder, "--name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--remember", str(memory)]
    with (tmp_path / "said").open("w+") as said:
        own = {**os.environ, "SELFSPEC_API_KEY": KEY}
        process = subprocess.Popen(command, stderr=said, stdout=said, env=own)
        try:
            wait_until(lambda: is_open(port) or process.poll() is not None)
            with client_of(port) as client:
                chat(client, "tiny")  # An answer that ended, from which something was learned.
                length = 480 if number == signal.SIGINT else 40
                stream = client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=length, stream=True, **NO_END
                )
                next(iter(stream))
                process.send_signal(number)
                check_end(stream, is_broken_off=number == signal.SIGINT)
                assert process.wait(PATIENCE) == status
        finally:
            process.kill()
            process.wait()
    lines = (tmp_path / "said").read_text()
    assert "Traceback" not in lines
    assert KEY not in lines
    assert f"statistics: http://127.0.0.1:{port}/selfspec/stats" in lines
    assert not is_open(port)
    assert memory.with_name("memory.safetensors").is_file()


def check_end(stream: Any, *, is_broken_off: bool) -> None:
    """An answer either comes to its own end, or its client is told."""
    if is_broken_off:
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert "the server is being stopped" in str(caught.value.body)
    else:
        *_, last = stream
        assert last.choices[0].finish_reason == "length"


def is_open(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).close()
    except OSError:
        return False
    return True
