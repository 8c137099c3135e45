"""Programs that load a model's folder which `selfspec prepare` has prepared.

A test is skipped where its program isn't installed. `tests/cli/test_prepare.py` has
pipelines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from selfspec.cli.app import run
from tests.tiny import make_model, make_tokenizer
from tests.waiting import free_port, is_open, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TEXT = "the quick brown fox jumps over the lazy dog\nthe quick"
_CLI = "transformers.cli.transformers"
_JSON = {"content-type": "application/json"}


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
    port = free_port()
    words = ["serve", str(folder), "--trust-remote-code", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", _CLI, *words]) as server:
        try:
            wait_until(lambda: is_open(port) or server.poll() is not None)
            body = {
                "model": str(folder),
                "messages": [{"role": "user", "content": TEXT}],
                **{"max_tokens": 16, "stream": False},
            }
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            with urlopen(Request(url, json.dumps(body).encode(), _JSON)) as response:
                return str(json.loads(response.read())["choices"][0]["message"]["content"])
        finally:
            server.terminate()
