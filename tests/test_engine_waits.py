"""What a step asks of the device, in which order, and when the CPU waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.recorder import RecordingDevice
from tests.scripted import Run, ScriptedModel, omniscient

MODEL = ScriptedModel(seed=3)
STEP = [
    "forward",
    "fetch",  # the ids that the walk needs
    "fetch",  # the tables
    "get",  # the ids, without a wait for the tables
    "commit",  # queued before the CPU waits for the tables
    "get",  # the tables
]


def test_a_greedy_step_waits_once_for_ids_and_once_for_tables():
    log: list[str] = []
    run = Run(MODEL, [[1, 2]], [omniscient(MODEL)], max_length=12, device=RecordingDevice(log))
    for method, name in (("run", "forward"), ("commit", "commit")):
        setattr(run.backend, method, told(log, name, getattr(run.backend, method)))
    run.decode()
    # Nothing comes before the first token, and no KV is moved.
    assert log == ["fetch", "get", "fetch", "get"] + STEP * run.stats.num_steps


def test_who_does_not_learn_asks_for_no_tables():
    log: list[str] = []
    device = RecordingDevice(log)
    run = Run(MODEL, [[1, 2]], [omniscient(MODEL)], 12, device=device, learns=False)
    run.decode()
    assert log == ["fetch", "get"] * (1 + run.stats.num_steps)


def told(log: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return function(*args, **kwargs)

    return call
