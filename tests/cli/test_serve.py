"""`selfspec serve`: its options, its signals, and what a client of OpenAI gets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra: pip install '.[serve]'")
pytest.importorskip("openai", reason="needs the extra: pip install '.[test]'")

import openai

from selfspec.cli import serve
from selfspec.cli.options import LearnOptions
from selfspec.config import SpecConfig
from tests.fakes import new_model
from tests.tiny import make_tokenizer
from tests.waiting import PATIENCE, free_port, is_open, wait_until

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
KEY = "a secret"
ASKED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0}


@contextmanager
def serving(folder: str, port: int, memory: Path, said: Path) -> Iterator[Any]:
    """Inside, the command answers in a process of its own."""
    command = [sys.executable, "-m", "selfspec", "serve", folder, "--name", "tiny", "-v"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--remember", str(memory)]
    own = {**os.environ, "SELFSPEC_API_KEY": KEY}
    with said.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream, env=own)
        try:
            wait_until(lambda: is_open(port) or process.poll() is not None)
            yield process
        finally:
            process.kill()
            process.wait()


def client_of(port: int, api_key: str = KEY) -> Any:
    base_url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["ctrl-c", "sigterm"]
)
def test_a_client_of_openai_and_a_signal_in_the_midst_of_its_answer(
    number: signal.Signals, status: int, chat_folder: str, tmp_path: Path, stock_text: Any
) -> None:
    """The answer is completed, and what was learned is kept."""
    port, memory, said = free_port(), tmp_path / "memory", tmp_path / "said"
    with serving(chat_folder, port, memory, said) as process, client_of(port) as client:
        create = client.chat.completions.create
        whole = create(**ASKED, max_tokens=24).choices[0].message.content
        chunks = create(**ASKED, max_tokens=24, stream=True)
        assert whole == "".join(each.choices[0].delta.content for each in chunks)
        assert whole == stock_text(MESSAGES, 24)
        with pytest.raises(openai.NotFoundError):
            create(**{**ASKED, "model": "no/such-model"})
        with pytest.raises(openai.BadRequestError, match="nonsense"):
            create(**ASKED, extra_body={"nonsense": 1})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another").models.list()
        stream = create(**ASKED, max_tokens=40, stream=True, logit_bias={"1": -100.0})
        next(iter(stream))
        process.send_signal(number)
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        assert process.wait(PATIENCE) == status
    lines = said.read_text()
    assert "Traceback" not in lines
    assert KEY not in lines
    assert f"statistics: http://127.0.0.1:{port}/selfspec/stats" in lines
    assert '"POST /v1/chat/completions HTTP/1.1" 400' in lines
    assert not is_open(port)
    assert memory.with_name("memory.safetensors").is_file()


def test_a_port_in_use(fails, chat_folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = fails("serve", chat_folder, "--host", "127.0.0.1", "--port", port)
    assert f"'127.0.0.1' and {port}: Address already in use" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--host", "no host"),
        ("--name", ""),
        ("--api-key", " "),
        ("--max-kv-memory", "much"),
        ("--port", "70000"),
    ],
)
def test_options_that_can_not_be(fails, chat_folder: str, name: str, value: str) -> None:
    port = () if name == "--port" else ("--port", free_port())
    assert name in fails("serve", chat_folder, *port, name, value)


def test_within_a_memory(chat_folder: str) -> None:
    """Keys and values get what the model leaves."""
    asked = LearnOptions(model=chat_folder, dtype="float32", max_memory="3MB")
    answering, _ = serve._model_thread(asked, serve.Listening(max_rows=3), SpecConfig())
    weights = sum(4 * each.numel() for each in answering.model.parameters())
    assert answering.max_memory == 3_000_000 - weights


@pytest.mark.parametrize("name", ["qwen3-next", "mamba"])
def test_a_model_whose_layers_keep_no_keys(name: str, tmp_path: Path) -> None:
    """What they keep instead is little, whatever the length of a text."""
    new_model(name, vocab_size=512).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    asked = LearnOptions(model=str(tmp_path), dtype="float32", device="cpu")
    answering, _ = serve._model_thread(asked, serve.Listening(max_rows=3), SpecConfig())
    answering.start()
    answering.join(PATIENCE)


@pytest.mark.parametrize(
    ("host", "key", "said"),
    [
        *((host, None, None) for host in ("localhost", "127.0.0.1", "::1")),
        *((host, None, "SELFSPEC_API_KEY") for host in ("0.0.0.0", "::", "box.example.org")),
        ("0.0.0.0", KEY, "unencrypted"),
    ],
)
def test_what_an_operator_should_know(host: str, key: str | None, said: str | None) -> None:
    warning = serve.Listening(host=host, api_key=key).warning
    assert (warning is None) == (said is None)
    assert (said or "") in (warning or "")


def test_without_the_extra_the_command_names_it(fails, monkeypatch, chat_folder: str) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "uvicorn" in fails("serve", chat_folder, "--port", free_port())
