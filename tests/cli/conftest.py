"""A tiny random model in a folder, and a way to run commands."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from selfspec.cli.app import app
from selfspec.cli.shared.model_loading import Loaded
from selfspec.cli.shared.options import Sampling
from selfspec.cli.shared.writer import Writer


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Commands say what the library logs from then on; later tests look at its logger too."""
    logger = logging.getLogger("selfspec")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def loaded(chat_folder) -> Loaded:
    model = AutoModelForCausalLM.from_pretrained(chat_folder)
    return Loaded("tiny", model, AutoTokenizer.from_pretrained(chat_folder))


@pytest.fixture
def writer(loaded) -> Writer:
    return Writer(loaded, Sampling(seed=0), 24)


@pytest.fixture
def stock_text(loaded):
    """What stock `generate()` writes behind some ids, or behind a prompt, decoded in one go."""

    def text(prompt: str | list[int], max_new_tokens: int, **kwargs) -> str:
        ids = loaded.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        output = type(loaded.model).generate(
            loaded.model,
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=max_new_tokens,
            **kwargs,
        )
        return loaded.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)

    return text


@pytest.fixture
def run():
    """Runs a command in this process; an exception that is no exit is raised."""

    def invoke(*args: str | Path, stdin: str | bytes | None = None):
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def fails(run):
    """Runs a command that must end with one line on stderr and status 2; returns the line.

    In front of it there may be lines that say what the command was doing, such as "Loading ...".
    """

    def line(*args: str | Path, stdin: str | bytes | None = None) -> str:
        result = run(*args, stdin=stdin)
        assert result.exit_code == 2
        assert result.stdout == ""
        *doing, line = result.stderr.splitlines(keepends=True)
        assert all(text.endswith(" ...\n") for text in doing)
        assert line.startswith("error: ")
        assert line.endswith("\n")
        return line

    return line
