"""A tiny random model in a folder, and a way to run commands."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub.utils import logging as hub_log
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_log

from selfspec.cli import app
from selfspec.cli.options import WriteOptions
from selfspec.cli.writer import Writer
from tests.sessions import alone


class Result(NamedTuple):
    """What a command printed, and how it ended."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Commands show our log and quieten those of others from then on; later tests look at them."""
    logger = logging.getLogger("selfspec")
    handlers, level = logger.handlers, logger.level
    verbosities = [each.get_verbosity() for each in (transformers_log, hub_log)]
    yield
    logger.handlers = handlers
    logger.setLevel(level)
    for each, verbosity in zip((transformers_log, hub_log), verbosities, strict=True):
        each.set_verbosity(verbosity)
    transformers_log.enable_progress_bar()


@pytest.fixture
def writer(chat_folder) -> Writer:
    model = AutoModelForCausalLM.from_pretrained(chat_folder)
    options = WriteOptions(seed=0, max_new_tokens=24)
    return Writer(options, model, AutoTokenizer.from_pretrained(chat_folder))


@pytest.fixture
def stock_text(writer):
    """What stock `generate()` writes behind a text, messages or ids, decoded in one go."""

    def text(prompt: str | list, max_new_tokens: int, *, seed: int = 0, **options) -> str:
        tokenizer, ids = writer.tokenizer, prompt
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        elif isinstance(prompt[0], dict):
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=False
            )
        new_ids = alone(writer.model, ids, seed, max_new_tokens=max_new_tokens, **options)
        return tokenizer.decode(new_ids, skip_special_tokens=True)

    return text


@pytest.fixture
def run(monkeypatch):
    """Runs a command in this process; an exception that nobody foresaw is raised."""

    def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
        given = stdin.encode() if isinstance(stdin, str) else stdin or b""
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
            status = app.run([str(arg) for arg in args])
        return Result(status, out.getvalue(), err.getvalue())

    return invoke


@pytest.fixture
def fails(run):
    """Runs a command that must end with status 2 and one line on stderr, which it returns.

    In front of it there may be lines that say what the command was doing, such as "Loading ...".
    """

    def line(*args: str | Path, stdin: str | bytes | None = None) -> str:
        result = run(*args, stdin=stdin)
        assert (result.exit_code, result.stdout) == (2, "")
        *doing, line = result.stderr.splitlines()
        assert all(text.endswith(" ...") for text in doing)
        assert line.startswith("error: ")
        return line

    return line


def write_lines(path: Path, *lines: object) -> Path:
    """A file of JSON lines; text is written as it is."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path
