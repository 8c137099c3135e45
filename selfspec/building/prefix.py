"""Tokens that every window of a build stands behind, read once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Prefix"]


class Prefix:
    """The tokens, and their KV cache once a model has read them; serves one model."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self._cache: Any = None

    def cache(self, model: Any, num_rows: int) -> Any:
        """A KV cache with the tokens in each row, for the caller to fill further."""
        if self._cache is None:
            ids = torch.tensor([self.ids], device=model.device)
            self._cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        twin = copy.deepcopy(self._cache)
        twin.batch_repeat_interleave(num_rows)
        return twin
