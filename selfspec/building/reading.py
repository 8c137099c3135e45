"""Fills the LUTs beforehand: the model reads texts, and the sources learn what it predicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.building.documents import TokenIds
from selfspec.building.limits import max_positions, vocab_size
from selfspec.building.recipe import Recipe
from selfspec.compat.generation import KV, kv_of
from selfspec.draft.memory import Memory
from selfspec.engine import top_k_of
from selfspec.records import TopK
from selfspec.run.packed import Packing

_MAX_LOGITS = 1 << 28  # Elements of one forward's output, to bound its memory.


def teach(
    memory: Memory,
    model: Any,
    documents: Iterable[TokenIds | None],
    recipe: Recipe,
    *,
    prefix: Sequence[int],
    tell: Callable[[int, int], None],
) -> int:
    """Shows the sources of `memory` what the model predicts after each token of the documents.

    Documents are cut into windows, which are read with `prefix` before each. `tell` gets the number
    of tokens after each forward, as what is done and as tokens. Returns the number of tokens.
    """
    length = min(recipe.window, max_positions(model) or recipe.window)
    rows = max(1, min(recipe.batch, _MAX_LOGITS // (vocab_size(model) * length)))
    windows = _windows(documents, length)
    reader = _Reader(model, memory.top_k, prefix)
    num_tokens = 0
    while not recipe.warmup_tokens or num_tokens < recipe.warmup_tokens:
        if not (batch := list(islice(windows, rows))):
            break
        for window, top in zip(batch, reader.read(batch), strict=True):
            memory.observe_pairs(_pairs(window), top)
        num_new = sum(map(len, batch))
        num_tokens += num_new
        tell(num_new, num_new)
    return num_tokens


def _windows(documents: Iterable[TokenIds | None], length: int) -> Iterator[TokenIds]:
    """The documents cut into windows that don't overlap."""
    for ids in documents:
        if ids is not None:
            for start in range(0, len(ids), length):
                yield ids[start : start + length]


def _pairs(ids: TokenIds) -> NDArray[np.int64]:
    """(N, 2): for each token the one before it, or -1, and the token itself."""
    return np.stack([np.concatenate([[-1], ids[:-1]]), ids], axis=-1)


class _Reader:
    """Runs a model over texts, from packed weights where these are faster.

    Whether they are is settled before the first forward, so that no later one rounds differently.
    """

    def __init__(self, model: Any, top_k: int, prefix: Sequence[int]) -> None:
        self._model = model
        self._top_k = top_k
        self._prefix = list(prefix)
        self._kv: Any = None  # The KV cache behind the prefix, once it was read.
        self._packing = Packing.of(model)

    def read(self, windows: Sequence[TokenIds]) -> list[TopK]:
        """What the model predicts after each token of each window, by one forward."""
        self._packing.pack()
        with self._packing.in_use():
            return self._predictions(windows)

    @torch.inference_mode()
    def _predictions(self, windows: Sequence[TokenIds]) -> list[TopK]:
        input_ids = torch.zeros(
            len(windows), max(map(len, windows)), dtype=torch.long, device="cpu"
        )
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(windows):
            input_ids[row, : len(ids)] = torch.from_numpy(ids)
            mask[row, : len(ids)] = 1
        known = torch.ones(len(windows), len(self._prefix), dtype=torch.long, device="cpu")
        device = self._model.device
        logits = self._model(
            input_ids=input_ids.to(device),
            attention_mask=torch.cat([known, mask], dim=1).to(device),
            **self._behind_prefix(len(windows)),
        ).logits
        return [top_k_of(logits[row, : len(ids)], self._top_k) for row, ids in enumerate(windows)]

    def _behind_prefix(self, num_rows: int) -> dict[str, Any]:
        """The arguments of a forward that goes on behind the prefix in each row."""
        if not self._prefix:
            return {"use_cache": False}
        if self._kv is None:
            ids = torch.tensor([self._prefix], device=self._model.device)
            self._kv = kv_of(self._model(input_ids=ids, use_cache=True, logits_to_keep=1))
        kv = copy.deepcopy(self._kv)
        kv.batch_repeat_interleave(num_rows)
        return {"use_cache": True, KV: kv}
