"""What one `SelfSpec` knows of a model is found out once, however many threads ask."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from selfspec import runner as run
from selfspec.ability.probe import DraftSupport
from selfspec.config import SpecConfig
from tests.fakes import tiny_model
from tests.lossless.same import in_threads


def test_a_model_is_tried_by_one_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that draws tokens during another one's trial would make the model seem to draw."""
    models, model = run.ModelRunners(SpecConfig()), tiny_model()
    tried: list[Any] = []

    def slowly(asked: Any, _width: int) -> DraftSupport:
        tried.append(asked)
        for _ in range(1000):
            time.sleep(0)  # Lets the other threads go on.
        return DraftSupport("plain", "it is only pretended to be tried", None)

    monkeypatch.setattr(run, "probe", slowly)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(lambda _index: models.run(model).ability(), 8, 8)
    finally:
        sys.setswitchinterval(interval)
    assert tried == [model]
