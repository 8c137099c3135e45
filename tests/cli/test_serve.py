"""`selfspec serve`: what a client of OpenAI gets is what transformers' own server says."""

from __future__ import annotations

import json
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
from time import monotonic, sleep
from typing import Any

import pytest
from transformers.cli.serve import Serve

from selfspec import SelfSpec
from selfspec.cli.server import DraftingServer

NEEDED = {"reason": "the server needs the extra: pip install 'selfspec[serve]'"}
pytest.importorskip("fastapi", **NEEDED)
pytest.importorskip("uvicorn", **NEEDED)
openai = pytest.importorskip("openai", **NEEDED)

PATIENCE = 30  # seconds, before a test that waits gives up
ENDLESS = 100_000  # tokens
NO_END = {"logit_bias": {"1": -100.0}}  # The text never ends by itself.
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(done: Callable[[], Any]) -> None:
    end = monotonic() + PATIENCE
    while not done():
        assert monotonic() < end, "waited in vain"
        sleep(0.01)


@contextmanager
def listening(server: Unstarted | DraftingServer) -> Iterator[openai.OpenAI]:
    """Inside, the server answers on a thread, as its class does in a process."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.server.started or not thread.is_alive())
        port = server.server.config.port
        with client_of(port) as client:
            yield client
    finally:
        server.server.should_exit = True
        thread.join(PATIENCE)


def client_of(port: int) -> openai.OpenAI:
    base_url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=PATIENCE)


class Unstarted(Serve):
    """transformers' server without us."""

    def start_server(self) -> None:
        """`listening` does."""

    def run(self) -> None:
        self.server.run()


def options() -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": free_port(), "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def stock(chat_folder: str) -> Iterator[openai.OpenAI]:
    with listening(Unstarted(force_model=chat_folder, non_blocking=True, **options())) as client:
        yield client


@pytest.fixture(scope="module")
def spec() -> SelfSpec:
    return SelfSpec()


@pytest.fixture(scope="module")
def client(chat_folder: str, spec: SelfSpec) -> Iterator[openai.OpenAI]:
    with listening(DraftingServer(chat_folder, spec, **options())) as client:
        yield client


def chat(client: openai.OpenAI, model: str, **extra: Any) -> str:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **extra}
    answer = client.chat.completions.create(**asked)
    if not extra.get("stream"):
        return str(answer.choices[0].message.content)
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def complete(client: openai.OpenAI, model: str, **extra: Any) -> str:
    asked = {"model": model, "prompt": "def read(", "max_tokens": 24, "temperature": 0, **extra}
    answer = client.completions.create(**asked)
    if not extra.get("stream"):
        return str(answer.choices[0].text)
    return "".join(chunk.choices[0].text for chunk in answer if chunk.choices)


def endless(client: openai.OpenAI, model: str) -> Any:
    """The stream of an answer that nobody waits for."""
    asked = {"model": model, "messages": MESSAGES, "max_tokens": ENDLESS, **NO_END}
    return client.chat.completions.create(stream=True, **asked)


def first_text(stream: Any) -> str:
    return next(text for chunk in stream if (text := chunk.choices[0].delta.content))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, complete])
def test_answers_are_those_of_transformers(
    ask: Any, stream: bool, client: openai.OpenAI, stock: openai.OpenAI, spec: SelfSpec, chat_folder
) -> None:
    before = spec.total_stats.num_calls
    expected = ask(stock, chat_folder, stream=stream)
    assert expected
    assert ask(client, chat_folder, stream=stream) == expected
    wait_until(lambda: spec.total_stats.num_calls == before + 1)  # A stream ends before its call.
    assert spec.stats.num_nodes > spec.stats.num_steps > 0


def test_two_clients_at_once(client: openai.OpenAI, chat_folder: str, spec: SelfSpec) -> None:
    before = spec.total_stats.num_calls
    asked = [(chat, {"stream": True}), (complete, {})] * 2
    alone = [ask(client, chat_folder, **extra) for ask, extra in asked]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(ask, client, chat_folder, **extra) for ask, extra in asked]
        assert [future.result(PATIENCE) for future in futures] == alone
    wait_until(lambda: spec.total_stats.num_calls == before + 2 * len(asked))


def test_a_client_that_goes_away_stops_its_answer(
    client: openai.OpenAI, chat_folder: str, spec: SelfSpec
) -> None:
    """Otherwise the next client would wait until all of it is written."""
    before = spec.total_stats
    with endless(client, chat_folder) as stream:
        first_text(stream)
    assert chat(client, chat_folder)
    assert spec.total_stats.num_calls == before.num_calls + 2
    assert spec.total_stats.num_new_tokens - before.num_new_tokens < ENDLESS


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another-model": (chat, {"model": "no/such-model"}, "pinned to"),
    "unknown-field": (chat, {"extra_body": {"nonsense": 1}}, "nonsense"),
    "no-text": (complete, {"prompt": [1, 2]}, "prompt must be a string"),
}


@pytest.mark.parametrize(("ask", "extra", "message"), BAD.values(), ids=BAD)
def test_bad_requests_are_answered_as_such(
    ask: Any, extra: dict[str, Any], message: str, client: openai.OpenAI, chat_folder: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **{"model": chat_folder, **extra})
    assert caught.value.status_code in (400, 422)
    assert message in caught.value.response.text
    assert chat(client, chat_folder)


def test_statistics_have_an_address(client: openai.OpenAI, chat_folder: str) -> None:
    def read() -> dict[str, Any]:
        url = str(client.base_url).replace("/v1/", "/selfspec/stats")
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return dict(json.load(answer))

    before = read()
    chat(client, chat_folder)
    after = read()
    assert after["num_calls"] == before["num_calls"] + 1
    assert after["tokens_per_step"] >= 1
    assert after["drafted_by_source"]["lut"] > 0


def test_a_model_that_was_unloaded_drafts_again(
    client: openai.OpenAI, chat_folder: str, spec: SelfSpec
) -> None:
    """This fails if transformers loads models by another way than the one we stand in."""
    expected = chat(client, chat_folder)
    url = str(client.base_url).replace("/v1/", "/reset")
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=PATIENCE).close()
    before = spec.total_stats.num_calls
    assert chat(client, chat_folder) == expected
    assert spec.total_stats.num_calls == before + 1


def test_a_model_that_is_not_there(fails, tmp_path: Path) -> None:
    assert "MODEL must be a folder" in fails("serve", tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    assert "can't be loaded" in fails("serve", tmp_path, "--port", free_port())


def test_a_port_in_use(fails, chat_folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = fails("serve", chat_folder, "--host", "127.0.0.1", "--port", port)
    assert f"--port must be free at 127.0.0.1 (got {port}: Address already in use)" in said
    assert "--host must be" in fails("serve", chat_folder, "--host", "no host")


def test_without_the_extra_the_command_names_it(fails, monkeypatch, chat_folder: str) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    said = fails("serve", chat_folder, "--port", free_port())
    assert "pip install 'selfspec[serve]'" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_midst_of_an_answer(
    number: signal.Signals, chat_folder: str, tmp_path: Path
) -> None:
    """It ends at once, says so, and keeps what it learned."""
    port, memory = free_port(), tmp_path / "memory"
    command = [sys.executable, "-m", "selfspec.cli", "serve", chat_folder]
    command += ["--host", "127.0.0.1", "--port", str(port), "--remember", str(memory)]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(command, stderr=said, stdout=said)
        try:
            wait_until(lambda: is_open(port) or process.poll() is not None)
            with client_of(port) as client:
                stream = endless(client, chat_folder)
                first_text(stream)
                process.send_signal(number)
                with pytest.raises(openai.APIError) as caught:
                    list(stream)
                assert "the server is being stopped" in str(caught.value.body)
                assert process.wait(PATIENCE) == 130
        finally:
            process.kill()
            process.wait()
    lines = (tmp_path / "said").read_text()
    assert "Traceback" not in lines
    assert f"statistics: http://127.0.0.1:{port}/selfspec/stats" in lines
    assert not is_open(port)
    assert any(memory.iterdir())


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
