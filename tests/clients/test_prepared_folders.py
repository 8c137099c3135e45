"""Programs that load a model's folder which `selfspec prepare` has prepared.

A test is skipped where its program isn't installed. `tests/cli/test_prepare.py` has
pipelines.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from selfspec.cli.app import run
from tests.tiny import make_model, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TEXT = "the quick brown fox jumps over the lazy dog\nthe quick"
_CLI = "transformers.cli.transformers"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The same model in a plain folder and in a prepared one."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = make_model(len(tokenizer)).eval()
    for name in ("plain", "prepared"):
        tokenizer.save_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / name)
    assert run(["prepare", str(tmp_path / "prepared")]) == 0
    return tmp_path / "plain", tmp_path / "prepared"


def test_lm_eval(folders: tuple[Path, Path]) -> None:
    instance = pytest.importorskip("lm_eval.api.instance")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    options = {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}
    texts = []
    for folder in folders:
        request = instance.Instance("generate_until", {}, (TEXT, options), 0)
        program = huggingface.HFLM(pretrained=str(folder), trust_remote_code=True, device="cpu")
        texts.append(program.generate_until([request], disable_tqdm=True))
    assert texts[0] == texts[1]
    assert vars(program.model)["_selfspec_attachment"].spec.stats.num_steps


def test_the_server_of_transformers(folders: tuple[Path, Path]) -> None:
    pytest.importorskip(_CLI)
    answers = [answer_of_server(folder) for folder in folders]
    assert answers[0] == answers[1]


def answer_of_server(folder: Path) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--trust-remote-code", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", _CLI, *words]) as server:
        try:
            wait_for(server, f"http://localhost:{port}/health")
            messages = [{"role": "user", "content": TEXT}]
            answer = post(
                f"http://localhost:{port}/v1/chat/completions",
                {"model": str(folder), "messages": messages, "max_tokens": 16, "stream": False},
            )
        finally:
            server.terminate()
    return str(answer["choices"][0]["message"]["content"])


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    while server.poll() is None:
        try:
            urlopen(url).close()
            return
        except URLError:
            time.sleep(0.2)
    raise AssertionError(f"the server ended with {server.returncode}")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer
