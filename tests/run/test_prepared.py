"""What one `SelfSpec` knows of a model is found out once, however many threads ask."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from selfspec.run import prepared
from selfspec.run.prepared import Forwards
from selfspec.run.probe import Ability
from tests.fakes import tiny_model


def test_a_model_is_tried_by_one_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that draws tokens during another one's trial would make the model seem to draw."""
    forwards, model = Forwards(), tiny_model()
    others: list[threading.Thread] = []
    tried: list[Any] = []

    def ask_again(asked: Any) -> Ability:
        tried.append(asked)
        if not others:
            others.append(threading.Thread(target=forwards.ability, args=(model,)))
            others[0].start()
            others[0].join(timeout=0.1)  # It is to wait, so this is how long the test takes.
        return Ability("plain", "it is only pretended to be tried", None)

    monkeypatch.setattr(prepared, "probe", ask_again)
    forwards.ability(model)
    others[0].join()
    assert tried == [model]
