"""Work beside the main stream changes nothing, however late it comes; nobody waits too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.config import SpecConfig
from selfspec.draft.sources import LutSource
from selfspec.machine.device import PlainDevice
from tests.recorder import RecordingDevice
from tests.scripted import EOS, VOCAB, Run, ScriptedModel, doubtful, omniscient

MODEL = ScriptedModel(seed=3)


def decoded(model: ScriptedModel, device: Any, chooser: str, **changes: Any) -> tuple[Any, ...]:
    """The texts, the steps, and the tables that were learned."""
    lut = LutSource(VOCAB, 3)
    arguments = {"prompts": [[1, 2], [3, 4]], "max_length": 24} | changes
    run = Run(model, sources=[lut, doubtful(model)], device=device, **arguments)
    texts = run.decode(getattr(run, chooser)())
    return texts, run.stats.num_steps, run.stats.accepted_lengths, lut.arrays()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    chooser=st.sampled_from(["greedy", "together", "processed"]),
    eos=st.sampled_from([None, EOS]),
    max_nodes=st.integers(1, 7),
)
def test_the_same_with_and_without_overlap(seed, chooser, eos, max_nodes):
    model = ScriptedModel(seed)
    config = SpecConfig(max_nodes=max_nodes)
    devices = [PlainDevice(), *(RecordingDevice([], overlap=overlap) for overlap in (True, False))]
    runs = [decoded(model, device, chooser, eos=eos, config=config) for device in devices]
    for *rest, arrays in runs[1:]:
        assert rest == list(runs[0][:-1])
        for name, array in runs[0][-1].items():
            np.testing.assert_array_equal(arrays[name], array)


STEP = [
    "fetch",  # the ids that the walk needs
    "side",  # the tables, beside
    "fetch beside",
    "get",  # the ids
    "side",  # the KV, beside
    "join",
    "get",  # the tables
]


def test_a_greedy_step_waits_once_for_ids_and_once_for_tables():
    log: list[str] = []
    run = Run(MODEL, [[1, 2]], [omniscient(MODEL)], max_length=12, device=RecordingDevice(log))
    run.decode()
    # Nothing comes before the first token, and no KV is moved.
    start = ["fetch", "get", "side", "fetch beside", "join", "get"]
    assert log == start + STEP * run.stats.num_steps


def test_who_does_not_learn_asks_for_no_tables():
    log: list[str] = []
    device = RecordingDevice(log)
    Run(MODEL, [[1, 2]], [omniscient(MODEL)], 12, device=device, learns=False).decode()
    assert "fetch beside" not in log


@pytest.mark.parametrize("overlap", [True, False])
def test_the_kv_is_moved_before_the_next_forward(overlap):
    log: list[str] = []
    device = RecordingDevice(log, overlap=overlap)
    run = Run(MODEL, [[1, 2]], [omniscient(MODEL)], max_length=12, device=device)
    run.backend.lay_out = told(log, "forward", run.backend.lay_out)  # type: ignore[method-assign]
    run.decode()
    *before_forwards, _ = " ".join(log).split("forward")
    assert len(before_forwards) == run.stats.num_steps
    assert all(before.rfind("join") > before.rfind("side") for before in before_forwards)


def told(log: list[str], name: str, function: Any) -> Any:
    def call(*args: Any) -> Any:
        log.append(name)
        return function(*args)

    return call
