"""What one `SelfSpec` knows of a model is found out once, however many threads ask."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from selfspec import runner as run
from selfspec.ability import look
from selfspec.ability.probe import DraftSupport
from selfspec.compat.generation import decoding_switches
from selfspec.config import SpecConfig
from tests.fakes import new_model, tiny_model
from tests.lossless.same import in_threads


def test_a_model_is_tried_by_one_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that draws tokens during another one's trial would make the model seem to draw."""
    model = tiny_model()
    runner = run.ModelRunner(model, SpecConfig())
    tried: list[Any] = []

    def slowly(asked: Any) -> DraftSupport:
        tried.append(asked)
        for _ in range(1000):
            time.sleep(0)  # Lets the other threads go on.
        return DraftSupport("plain", "it is only pretended to be tried", None)

    monkeypatch.setattr(run, "probe", slowly)
    in_threads(lambda _index: runner.support(), 8, 8)
    assert tried == [model]


def test_a_model_is_not_tried_while_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate()` then runs its experts in another way, where it computes on a GPU."""
    model = new_model("mixtral")
    model.set_experts_implementation("grouped_mm")
    tried = list[Any]()

    def noted(asked: Any) -> DraftSupport:
        tried.append(asked)
        return DraftSupport("plain", "it is only pretended to be tried", None)

    monkeypatch.setattr(run, "probe", noted)
    monkeypatch.setattr(look, "device_of", lambda _model: torch.device("cuda"))
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    known = run.ModelRunner(model, SpecConfig())
    known.support()
    with decoding_switches(model):
        in_threads(lambda _index: known.support(), 1, 1)
    assert tried == [model]
