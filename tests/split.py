"""Makes every forward over drafts compute attention in two parts, wherever that can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.run import backends, grouped_attention, two_parts
from selfspec.run.two_parts import Parts, TwoParts, in_two_parts


def use_two_parts(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """Lets two parts win wherever a trial finds them to be right; returns what was computed so.

    They can't be had where values have another size than keys, as in DeepSeek's attention.
    """
    log: list[Parts] = []
    logits_of, tried = backends.logits_of, TwoParts()

    def split(model: Any, layout: Any, cache: Any, _two_parts: Any = None) -> torch.Tensor:
        return logits_of(model, layout, cache, tried)

    def noted(parts: Parts) -> torch.Tensor:
        outcome = in_two_parts(parts)
        log.append(parts)
        return outcome

    monkeypatch.setattr(backends, "logits_of", split)
    monkeypatch.setattr(grouped_attention, "in_two_parts", noted)
    monkeypatch.setattr(two_parts, "_LEAST_COLUMNS", 1)
    monkeypatch.setattr(two_parts, "_PAYS", 1.0)
    monkeypatch.setattr(two_parts, "_seconds", lambda *_: 1.0)
    return log
