"""`remember` from process to process: saved at exit, known the next time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import json, sys
from selfspec import SelfSpec
from tests.fakes import attached_model, prompt

folder, learning, ending, *seeds = sys.argv[1:]
spec = SelfSpec(remember=folder, max_nodes=8, budget="fixed", learning=learning)
texts = [
    attached_model().generate(**prompt(seed=int(seed)), assistant=spec, max_new_tokens=24).tolist()
    for seed in seeds
]
print(json.dumps({"steps": spec.total_stats.num_steps, "texts": texts}))
if ending == "error":
    raise SystemExit("something else went wrong")
"""


def start(folder: Path, *seeds: int, learning: str = "session", ending: str = "well"):
    home = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder.parent / "home")}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), learning, ending, *map(str, seeds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **home},
    )


def finish(process, status: int = 0) -> dict:
    out, err = process.communicate()
    assert process.returncode == status, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("ending", "status"), [("well", 0), pytest.param("error", 1, marks=pytest.mark.slow)]
)
def test_the_second_process_starts_warm(tmp_path, ending, status):
    folder = tmp_path / "mine"
    cold = finish(start(folder, 1, ending=ending), status)
    warm = finish(start(folder, 1, learning="frozen"))
    assert warm["texts"] == cold["texts"]
    assert warm["steps"] < cold["steps"]
