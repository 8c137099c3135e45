"""`remember` from process to process: saved at exit, known the next time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec import SelfSpec
from tests.caches import FakeTokenizer
from tests.fakes import VOCAB, attached_model, prompt

ROOT = Path(__file__).resolve().parent.parent
KNOBS = {"max_nodes": 8, "budget": "fixed"}
SCRIPT = """
import json, sys
from tests.test_second_day import answered

print(json.dumps(answered(sys.argv[1])))
raise SystemExit("something else went wrong")
"""


def answered(path: str, **knobs: str) -> tuple[list[list[int]], int]:
    """A text, and in how many steps it was written."""
    spec = SelfSpec(remember=path, tokenizer=FakeTokenizer(VOCAB), **KNOBS, **knobs)
    ids = attached_model().generate(**prompt(), assistant=spec, max_new_tokens=24)
    return ids.tolist(), spec.total_stats.num_steps


@pytest.mark.slow
def test_what_a_process_learned_is_known_to_the_next_even_if_it_failed(tmp_path):
    path = str(tmp_path / "mine")
    home = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "home")}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **home},
    )
    assert process.returncode == 1, process.stderr
    text, num_steps = json.loads(process.stdout.splitlines()[-1])
    again, fewer = answered(path, learning="frozen")
    assert again == text
    assert fewer < num_steps
