"""What the tests of the measuring commands share: questions, and no file of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TASKS = ("writing", "qa", "translation")


@pytest.fixture(autouse=True)
def _no_user_folder(tmp_path_factory, monkeypatch):
    """Cost curves go to a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))


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
