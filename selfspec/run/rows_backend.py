"""Trees of rows that come and go, whose keys and values may have a limit.

All rows have the same number of columns. When a row leaves, the last one moves into its place, so
the rows in use always lie side by side, as a forward needs them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from selfspec.compat.generation import KV
from selfspec.run.backends import TreeBackend
from selfspec.run.model import AttentionTypes, device_of
from selfspec.run.tree_kv import TreeKV, bytes_per_token

__all__ = ["RowsBackend", "kv_bytes_per_token"]


class RowsBackend(TreeBackend):
    """A `TreeBackend` without rows at first, to which rows are added.

    `max_bytes` is what the keys and values may take, among them those of a prompt that is being
    read, which has one share of `max_rows + 1`, and the copy of a part that is made when rows get
    more columns. None: there is no limit.
    """

    def __init__(
        self, model: Any, attention: AttentionTypes, *, max_rows: int, max_bytes: int | None
    ) -> None:
        self.max_tokens = self.max_prompt = None
        if max_bytes is not None:
            whole, part = bytes_per_token(_cache_of_one_token(model))
            self.max_prompt = max_bytes // (whole * (max_rows + 1) + part * max_rows)
            self.max_tokens = self.max_prompt * max_rows
        kv = TreeKV(attention, max_rows=max_rows, max_tokens=self.max_tokens)
        super().__init__(model, attention, kv=kv)

    def add_row(self, cache: Cache, next_positions: torch.Tensor, need: int) -> None:
        """Takes in a prompt that was read, with the position ids (..., 1, 1) of its next token.

        `need` is how many columns its row may come to need, the widest tree's among them.
        """
        self.add(cache, next_positions, need=need, room=max(self.front, cache.get_seq_length()))


def kv_bytes_per_token(model: Any) -> int:
    """What the keys and values of one token take; reads a token to find out."""
    return bytes_per_token(_cache_of_one_token(model))[0]


def _cache_of_one_token(model: Any) -> DynamicCache:
    """Shows the shape, the dtype and the device of each layer's keys and values."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{KV: cache})
    return cache
