"""What a small model says after a text, with an ordinary KV cache of it.

Knows tokens; not why they are read, nor what the target says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from selfspec.compat.generation import KV
from selfspec.draft.sources.draft_chain import DraftModelCursor
from selfspec.draft.sources.source import RowStart, Source, nothing
from selfspec.forward.model import device_of, takes
from selfspec.machine.device import upload
from selfspec.records import DRAFT_MODEL, Likely
from selfspec.weights import Packing

_CHUNK = 512  # At most this many tokens are read in one forward.


def likeliest(logits: torch.Tensor, num: int) -> list[Likely]:
    """The likeliest tokens, with their chances, by each of some logits (N, V)."""
    logits = logits.float()
    top = logits.topk(min(num, logits.shape[-1]))
    chances = (top.values - logits.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
    # One copy, since each waits for the device; a float holds every id below 2**24.
    rows = torch.stack([top.indices.float(), chances], dim=1).tolist()
    return [list(zip(map(int, ids), shares, strict=True)) for ids, shares in rows]


class DraftModel(Source):
    """A small model, and how to ask it; keeps nothing of any text.

    `num_ids` is how many ids the target knows: others are never named. `top_k` is how many tokens
    are named after a token. `packing` packs the model's weights when that pays.
    """

    name = DRAFT_MODEL

    def __init__(
        self, model: Any, *, num_ids: int, top_k: int, packing: Packing | None = None
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self._packing = packing
        self._num_named = min(num_ids, self.config.vocab_size)
        self._top_k = min(top_k, self._num_named)
        self._options = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}

    def open(self, row: RowStart) -> DraftModelCursor:
        """A cursor that reads the prompt before the first step, if that pays."""
        text = DraftText(self, row.count_forward)
        return DraftModelCursor(text, row.prompt_ids, row.budget, row.max_new_tokens)

    def forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The logits (V,) after further tokens (1, N) of a text."""
        with self._packed(ids.shape[1]):
            output = self.model(input_ids=ids, use_cache=True, **{KV: cache}, **self._options)
        return output.logits[0, -1]  # type: ignore[no-any-return]

    def likely(self, logits: torch.Tensor) -> Likely:
        """The likeliest next tokens, from logits (V,)."""
        return likeliest(logits[None, : self._num_named], self._top_k)[0]

    @contextmanager
    def _packed(self, num_tokens: int) -> Iterator[None]:
        """Inside, one forward is run over `num_tokens` tokens; packs weights first if that pays."""
        if self._packing is None:
            yield
            return
        self._packing.before_forward(num_tokens)
        with self._packing.in_use():
            yield


class DraftText:
    """One row's text as a small model has read it, with drafts at its end."""

    def __init__(
        self, draft_model: DraftModel, count_forward: Callable[[], None] = nothing
    ) -> None:
        self._draft_model = draft_model
        self._count_forward = count_forward
        self._cache = DynamicCache()  # Windowed layers keep all columns, so that drafts can go.
        self._length = 0

    @property
    def room(self) -> float:
        """How many tokens may still come before the model runs out of positions."""
        longest = getattr(self._draft_model.config, "max_position_embeddings", None)
        return float("inf") if longest is None else longest - self._length

    @torch.no_grad()
    def read(self, token_ids: Sequence[int]) -> Likely:
        """Reads further tokens, one at least; returns what is likely after them.

        An id that the model lacks is read as its last one.
        """
        last = self._draft_model.config.vocab_size - 1
        known = [token if 0 <= token < last else last for token in token_ids]
        ids = upload(torch.tensor([known], device="cpu"), device_of(self._draft_model.model))
        for part in torch.split(ids, _CHUNK, dim=1):
            self._count_forward()
            logits = self._draft_model.forward(part, self._cache)
            self._length += part.shape[1]
        return self._draft_model.likely(logits)

    def crop(self, num_tokens: int) -> None:
        if num_tokens:
            self._length -= num_tokens
            self._cache.crop(-num_tokens)
