"""Every layer that can be packed is, from the first token on, whatever a clock would say."""

from __future__ import annotations

import pytest

from selfspec.run import prepared
from selfspec.run.packed import weights


@pytest.fixture(autouse=True)
def packed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums come out rounded otherwise wherever they ever may."""
    monkeypatch.setattr(prepared, "_TOKENS_THAT_PAY", 0)
    monkeypatch.setattr(weights, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(weights, "_pays", lambda _modules: True)
