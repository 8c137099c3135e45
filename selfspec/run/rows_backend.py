"""Trees of rows that come and go, over slots that the rows share out among themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from selfspec.run.attention_types import AttentionTypes
from selfspec.run.backends import TreeBackend
from selfspec.run.model import device_of
from selfspec.run.rows_kv import RowsKV, bytes_per_token

__all__ = ["RowsBackend", "kv_bytes_per_token"]


class RowsBackend(TreeBackend):
    """A `TreeBackend` without rows at first, to which rows are added.

    `max_bytes` is what the keys and values may take, among them those of a prompt that is being
    read, which has one share of `max_rows + 1`, and the copy of a part that is made when rows are
    divided anew. None: there is no limit.
    """

    kv: RowsKV

    def __init__(
        self, model: Any, attention: AttentionTypes, *, max_rows: int, max_bytes: int | None
    ) -> None:
        cache = _cache_of_one_token(model)
        self.max_tokens = self.max_prompt = None
        if max_bytes is not None:
            whole, part = bytes_per_token(cache)
            self.max_prompt = max_bytes // (whole * (max_rows + 1) + part * max_rows)
            self.max_tokens = self.max_prompt * max_rows
        kv = RowsKV(cache, attention.by_layer, max_rows=max_rows, max_tokens=self.max_tokens)
        super().__init__(model, cache, attention, torch.zeros(0, 1, dtype=torch.long), None, kv=kv)

    def add_row(self, cache: Cache, next_positions: torch.Tensor, need: int) -> None:
        """Takes in a prompt that was read, with the position ids (..., 1, 1) of its next token.

        `need` is how many columns its row may come to need, the widest tree's among them.
        """
        self.kv.add_row(cache, need)
        positions = next_positions[..., 0].cpu().numpy()
        if self._positions.ndim != positions.ndim:  # These are the first ones.
            self._positions = positions[..., :0]
        self._positions = np.concatenate([self._positions, positions], axis=-1)


def kv_bytes_per_token(model: Any) -> int:
    """What the keys and values of one token take; reads a token to find out."""
    return bytes_per_token(_cache_of_one_token(model))[0]


def _cache_of_one_token(model: Any) -> DynamicCache:
    """Shows the shape, the dtype and the device of each layer's keys and values."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache
