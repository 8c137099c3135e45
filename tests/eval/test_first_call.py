"""The first call is measured in processes that know nothing of one another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eval import first_call
from eval.methods.one_call import Job, Result


@pytest.mark.slow
def test_a_call_runs_in_a_process_with_folders_of_its_own(chat_folder):
    job = Job(chat_folder, "selfspec", [5, 6, 7], 4, "float32", 1, {"max_nodes": 4})
    result = first_call._call(job)
    assert len(result.new_ids) == 4
    assert min(result.call_seconds, result.load_seconds, result.import_seconds) > 0
    assert result.disabled_reason is None
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


@pytest.fixture
def calls(monkeypatch):
    """No process is started: seconds come from a list."""
    made = []
    seconds = iter([9.0, 9.0, 2.0, 3.0, 4.4, 4.0, 2.0, 3.2])

    def call(job):
        made.append(job)
        return Result(next(seconds), 1.0, 0.5, [1, 2], None)

    monkeypatch.setattr(first_call, "_call", call)
    return made


def test_the_order_changes_and_the_first_round_does_not_count(calls, chat_folder, figures):
    asked = ["--model", chat_folder, "--rounds", "3", "--knob", "top_k=4", "--prompt", "a " * 999]
    told = figures("first_call", *asked)
    assert (told["model"], told["prompt"]) == (Path(chat_folder).name, "a " * 999)
    assert [job.method for job in calls] == ["selfspec", "stock", "stock", "selfspec"] * 2
    assert told["seconds"] == {"stock": [2.0, 4.0, 2.0], "selfspec": [3.0, 4.4, 3.2]}
    assert told["ratio"] == 1.6
    assert told["ratios"] == [1.5, 1.1, 1.6]
    assert calls[0].knobs == {"top_k": 4}
    assert calls[0].prompt_ids
