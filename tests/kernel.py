"""Plays the kernel for masked attention that CUDA has, on a CPU, as strictly as it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from selfspec.run import grouped_attention, masked_attention

__all__ = ["use_kernel"]

_FILLED = 32  # The log-sum-exps of queries come in multiples of this.


def use_kernel(monkeypatch: pytest.MonkeyPatch, processors: int = 132) -> list[int]:
    """Lets this CPU pass for a card; returns into how many parts the keys of each call were cut."""
    log: list[int] = []

    def attend(
        query: Any, key: Any, value: Any, bias: Any, needs_sums: bool, scale: float | None
    ) -> Any:
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert key.data_ptr() % 16 == value.data_ptr() % 16 == bias.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
        log.append(query.shape[1] if needs_sums else 1)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query.float() @ key.float().mT * scale + bias.float()
        # What a real one does to queries that see nothing at all.
        blind = (scores < -1e30).all(-1, keepdim=True)
        outcome = (scores.softmax(-1) @ value.float()).masked_fill(blind, torch.nan)
        sums = pad(scores.logsumexp(-1), (0, -query.shape[2] % _FILLED), value=torch.inf)
        return outcome.to(query.dtype), sums

    for module in (masked_attention, grouped_attention):
        monkeypatch.setattr(module, "is_on_card", lambda _device: True)
    monkeypatch.setattr(masked_attention, "efficient_attention", attend)
    monkeypatch.setattr(masked_attention, "_num_processors", lambda _device: processors)
    return log
