"""Fills the LUTs beforehand: the model reads texts, and the sources learn what it predicts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selfspec.building.texts import TokenIds
from selfspec.compat.generation import KV, kv_of
from selfspec.draft.learned import Learned
from selfspec.forward.model import max_positions, vocab_size
from selfspec.learning import top_k_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

_MAX_LOGITS = 1 << 28  # Elements of one forward's output, to bound its memory.
_WINDOW, _ROWS = 256, 8  # Tokens that are read in a row, and rows in a forward.
_SINGLE_TOKENS = 128  # Rows of one token each, after a prefix.


def teach(
    learned: Learned,
    model: PreTrainedModel,
    documents: Iterable[TokenIds],
    *,
    prefix: Sequence[int] = (),
) -> Iterator[int]:
    """Shows the sources of `learned` what the model predicts after each token of the documents.

    Documents are cut into windows. With a `prefix`, each token is read alone after it. Yields the
    number of tokens that each forward has read.
    """
    length = 1 if prefix else min(_WINDOW, max_positions(model) or _WINDOW)
    most_rows = _SINGLE_TOKENS if prefix else _ROWS
    rows = max(1, min(most_rows, _MAX_LOGITS // (vocab_size(model) * length)))
    windows = (
        ids[start : start + length] for ids in documents for start in range(0, len(ids), length)
    )
    kv = _kv_after(model, prefix)
    while batch := list(islice(windows, rows)):
        logits = _logits(model, batch, len(prefix), kv)
        for window, row in zip(batch, logits, strict=True):
            # (N, 2): for each token the one before it, or -1, and the token itself.
            pairs = np.stack([np.append(-1, window[:-1]), window], axis=-1)
            learned.observe_pairs(pairs, top_k_of(row[: len(window)], learned.top_k))
        yield sum(map(len, batch))


def begin_of_chat(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning of an answer in a chat without a topic, or of a text if there is no template.

    After it, a model predicts what comes after a token in most answers.
    """
    if not tokenizer.chat_template:
        ids: list[int] = tokenizer("\n")["input_ids"]
        return ids
    chat = [{"role": "user", "content": "Hello"}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


@torch.inference_mode()
def _kv_after(model: PreTrainedModel, prefix: Sequence[int]) -> Cache | None:
    if not prefix:
        return None
    ids = torch.tensor([list(prefix)], device=model.device)
    return kv_of(model(input_ids=ids, use_cache=True, logits_to_keep=1))


@torch.inference_mode()
def _logits(
    model: PreTrainedModel, windows: Sequence[TokenIds], num_before: int, kv: Cache | None
) -> torch.Tensor:
    """The logits (B, N, V) after each token of each window, by one forward."""
    input_ids = torch.zeros(len(windows), max(map(len, windows)), dtype=torch.long, device="cpu")
    mask = torch.ones(len(windows), num_before + input_ids.shape[1], dtype=torch.long, device="cpu")
    for row, ids in enumerate(windows):
        input_ids[row, : len(ids)] = torch.from_numpy(ids)
        mask[row, num_before + len(ids) :] = 0
    more: dict[str, Any] = {"use_cache": False}
    if kv is not None:
        more = {"use_cache": True, KV: copy.deepcopy(kv)}
        more[KV].batch_repeat_interleave(len(windows))
    logits: torch.Tensor = model(
        input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device), **more
    ).logits
    return logits
