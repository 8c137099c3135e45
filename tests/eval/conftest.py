"""What the tests of the measuring commands share: questions, and ways to run a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.command import main
from eval.runs import attempt

TASKS = ("writing", "qa", "translation")


@pytest.fixture(autouse=True)
def _on_an_idle_machine(monkeypatch):
    """As far as we are told."""
    monkeypatch.setattr(attempt, "processor_share", lambda: 1.0)


@pytest.fixture
def told(capsys) -> Callable[..., tuple[int, list[str], str]]:
    """Runs a command of eval; returns its status, the lines of stdout, and stderr."""

    def run(command: str, *options: str) -> tuple[int, list[str], str]:
        capsys.readouterr()
        status = main([command, *options])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return run


@pytest.fixture
def figures(told) -> Callable[..., dict[str, Any]]:
    """Runs a command that must end well; returns its last line."""

    def run(command: str, *options: str) -> dict[str, Any]:
        status, lines, error = told(command, *options)
        assert status == 0, error
        return json.loads(lines[-1])

    return run


@pytest.fixture
def asked(chat_folder, questions) -> list[str]:
    """Options of a command: a chat model, and the questions."""
    return ["--model", chat_folder, "--questions", str(questions)]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Twelve questions of each task, told apart by their ids."""
    path = tmp_path / "question.jsonl"
    entries = [
        {"question_id": 100 * t + n, "category": task, "turns": [f"the fox {n}", "and then?"]}
        for t, task in enumerate(TASKS)
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path
