"""A small model that drafts. It has an ordinary KV cache of every text.

Its KV goes with the paths that are asked for: what a path shares with the last one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from selfspec.compat.generation import KV
from selfspec.draft.sources.source import RowStart, Source, shared_length
from selfspec.draft.sources.worth import SourceWorth
from selfspec.forward.model import device_of, takes
from selfspec.machine.device import upload
from selfspec.neural.draft_cursor import FULL_GAIN, DraftCursor, Path
from selfspec.records import DRAFT_MODEL, TimeBudget

# More than 16 unread tokens are read before a step, in parts of 32, 64, 128, 256 and 512 tokens.
# Each part's time tells what the next one will take.
_FEW, _FIRST_PART, _LONGEST_PART = 16, 32, 512


class DraftModel(Source):
    """A small model, and how to ask it; keeps nothing of any text.

    `num_ids` is how many ids the target knows: others are never named. `top_k` is how many tokens
    are named after a token. `worth` is that of a forward over one token, in all texts.
    """

    name = DRAFT_MODEL

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_ids: int,
        top_k: int,
        worth: SourceWorth | None = None,
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self._worth = SourceWorth(FULL_GAIN) if worth is None else worth
        self._num_named = min(num_ids, self.config.vocab_size)
        self._top_k = min(top_k, self._num_named)
        self._options = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}

    def open(self, row: RowStart) -> DraftCursor:
        return DraftCursor(self.text(row), row, self._top_k, self._worth)

    def text(self, row: RowStart) -> SmallModelText:
        return SmallModelText(self, row.prompt_ids, row.max_new_tokens, row.count_forward)

    def forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The logits (V,) after further tokens (1, N) of a text."""
        output = self.model(input_ids=ids, use_cache=True, **{KV: cache}, **self._options)
        return output.logits[0, -1, : self._num_named]  # type: ignore[no-any-return]


class SmallModelText:
    """One row's text as a small model has read it, with a path at its end.

    A prompt is read on while drafts may lose that time, and if the rest of it costs no more than
    the tokens to come.
    """

    def __init__(
        self,
        draft_model: DraftModel,
        prompt_ids: Sequence[int],
        max_new_tokens: float,
        count_forward: Callable[[], None],
    ) -> None:
        self._draft_model = draft_model
        self._count_forward = count_forward
        self._num_left = max_new_tokens
        self._cache = DynamicCache()  # Windowed layers keep all columns, so that drafts can go.
        self._num_read = 0  # Tokens in the cache.
        self._unread = list(prompt_ids)  # Committed tokens.
        self._path: Path = ()  # What was read after the committed text.
        self._part, self._per_token = _FIRST_PART, 0.0  # Tokens of the next; seconds in the last.

    def prepare(self, budget: TimeBudget) -> None:
        """Reads what is more than a few tokens, such as a prompt, while that is affordable."""
        while len(self._unread) > _FEW and self._has_positions(len(self._unread)):
            num_tokens = min(self._part, len(self._unread) - 1)  # The last one is read with a path.
            price = budget.break_even_tokens(self._per_token * len(self._unread))
            if price > self._num_left or not budget.affords(self._per_token * num_tokens):
                return
            start = perf_counter()
            self._read(self._unread[:num_tokens])
            seconds = perf_counter() - start
            self._unread = self._unread[num_tokens:]
            self._part, self._per_token = min(2 * self._part, _LONGEST_PART), seconds / num_tokens
            budget.charge(seconds)

    def read(self, path: Path) -> torch.Tensor | None:
        num_shared = shared_length(self._path, path[:-1])  # The last token is read in any case.
        new = [*self._unread, *path[num_shared:]]
        self._crop(num_shared)
        if not new or len(self._unread) > _FEW or not self._has_positions(len(new)):
            return None
        logits = self._read(new)
        self._unread, self._path = [], path
        return logits

    def observe(self, committed: Sequence[int]) -> None:
        """Keeps the part of the path that became text, and its rest if all new text is in it."""
        num_shared = shared_length(self._path, committed)
        self._num_left -= len(committed)
        if num_shared < len(committed):
            self._crop(num_shared)
            self._unread += committed[num_shared:]
        self._path = self._path[num_shared:]

    def _has_positions(self, num_tokens: int) -> bool:
        longest = getattr(self._draft_model.config, "max_position_embeddings", None)
        return longest is None or num_tokens <= longest - self._num_read

    def _crop(self, length: int) -> None:
        """Keeps so many tokens of the path."""
        if num_tokens := len(self._path) - length:
            self._num_read -= num_tokens
            self._cache.crop(-num_tokens)
            self._path = self._path[:length]

    @torch.no_grad()
    def _read(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Reads further tokens, one at least. An id that the model lacks is read as its last."""
        last = self._draft_model.config.vocab_size - 1
        known = [token if 0 <= token < last else last for token in token_ids]
        ids = upload(torch.tensor([known], device="cpu"), device_of(self._draft_model.model))
        self._count_forward()
        logits = self._draft_model.forward(ids, self._cache)
        self._num_read += len(known)
        return logits
