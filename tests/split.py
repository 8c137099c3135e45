"""Makes every forward over drafts compute attention in two parts, wherever that can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.run import backends, grouped_attention
from selfspec.run.two_parts import Parts, TwoParts, in_two_parts

__all__ = ["use_two_parts"]


def use_two_parts(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """Chooses two parts without a trial; returns what was computed so."""
    log: list[Parts] = []
    logits_of = backends.logits_of

    def split(model: Any, layout: Any, cache: Any, _two_parts: Any = None) -> torch.Tensor:
        return logits_of(model, layout, cache, TwoParts())

    def noted(parts: Parts) -> torch.Tensor:
        log.append(parts)
        return in_two_parts(parts)

    monkeypatch.setattr(backends, "logits_of", split)
    monkeypatch.setattr(grouped_attention, "in_two_parts", noted)
    monkeypatch.setattr(TwoParts, "pay", lambda *_: True)
    return log
