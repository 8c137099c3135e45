"""`remember` from process to process: saved at exit, known the next time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec.store import load_cache, verify_cache

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import json, sys
from selfspec import SelfSpec
from tests.fakes import VOCAB, attached_model, prompt

folder, learning, ending, *seeds = sys.argv[1:]
spec = SelfSpec(remember=folder, max_nodes=8, budget="fixed", learning=learning)
spec.memory(VOCAB)
print("opened", flush=True)
sys.stdin.readline()
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
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **home},
    )


def finish(process, status: int = 0) -> dict:
    out, err = process.communicate("go on\n")
    assert process.returncode == status, err
    return json.loads(out.splitlines()[-1])


def tokens_kept(folder: Path) -> set[int]:
    assert verify_cache(folder / "memory").ok
    return set(load_cache(folder / "memory").tables["lut"]["tokens"].tolist())


@pytest.mark.parametrize(
    ("ending", "status"), [("well", 0), pytest.param("error", 1, marks=pytest.mark.slow)]
)
def test_the_second_process_starts_warm(tmp_path, ending, status):
    folder = tmp_path / "mine"
    cold = finish(start(folder, 1, ending=ending), status)
    warm = finish(start(folder, 1, learning="frozen"))
    assert warm["texts"] == cold["texts"]
    assert warm["steps"] < cold["steps"]


@pytest.mark.slow
def test_two_processes_at_once_lose_nothing(tmp_path):
    alone = [tmp_path / name for name in ("one", "other")]
    together = tmp_path / "together"
    seeds = (1, 2)
    for folder, seed in zip(alone, seeds, strict=True):
        finish(start(folder, seed))
    processes = [start(together, seed) for seed in seeds]
    assert [process.stdout.readline() for process in processes] == ["opened\n", "opened\n"]
    for process in processes:
        finish(process)
    assert tokens_kept(together) == set.union(*map(tokens_kept, alone))
