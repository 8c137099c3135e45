"""A small model's guesses: a chain of tokens, with what it thinks likely after them.

The chain grows while a tree does: where children are wanted of a token after its last one, one
forward of the small model reads this token, if it is likely enough to be accepted. The model has an
ordinary KV cache of every text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from selfspec.compat.generation import KV
from selfspec.draft.sources.source import Cursor, RowStart, Source, nothing
from selfspec.draft.sources.worth import SourceWorth
from selfspec.forward.model import device_of, takes
from selfspec.machine.device import upload
from selfspec.neural.named import AGAINST, named, ranked
from selfspec.records import (
    DRAFT_MODEL,
    Candidate,
    Draws,
    Likely,
    StepRecord,
    TimeBudget,
    sources_of,
)

FULL_GAIN = 1.0  # Each forward is believed to bring a token, until that was counted.
_CHUNK = 512  # At most this many tokens are read in one forward.
# More than 16 unread tokens are read before a step, in parts of 32, 64, 128, 256 and 512 tokens.
# Each part's time tells what the next one will take.
_FEW, _FIRST_PART, _LONGEST_PART = 16, 32, 512

Drafts = tuple[int, ...]  # The tokens after the committed text.


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
        self._worth = SourceWorth(FULL_GAIN) if worth is None else worth
        self.config = model.config.get_text_config(decoder=True)
        self._num_named = min(num_ids, self.config.vocab_size)
        self._top_k = min(top_k, self._num_named)
        self._options = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}

    def open(self, row: RowStart) -> DraftModelCursor:
        text = DraftText(self, row.count_forward, row.draws)
        prompt_ids, num_left = row.prompt_ids, row.max_new_tokens
        return DraftModelCursor(text, prompt_ids, row.budget, num_left, row.draws, self._worth)

    def forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The logits (V,) after further tokens (1, N) of a text."""
        output = self.model(input_ids=ids, use_cache=True, **{KV: cache}, **self._options)
        return output.logits[0, -1]  # type: ignore[no-any-return]

    def likely(self, logits: torch.Tensor, draws: Draws, depth: int) -> Likely:
        return ranked(logits[: self._num_named], self._top_k, draws, depth)


class DraftText:
    """One row's text as a small model has read it, with drafts at its end."""

    def __init__(
        self,
        draft_model: DraftModel,
        count_forward: Callable[[], None] = nothing,
        draws: Draws = Draws(),  # noqa: B008 has no state
    ) -> None:
        self._draft_model = draft_model
        self._count_forward = count_forward
        self._draws = draws
        self._cache = DynamicCache()  # Windowed layers keep all columns, so that drafts can go.
        self._length = 0

    @property
    def num_left(self) -> float:
        """How many tokens may still come before the model runs out of positions."""
        longest = getattr(self._draft_model.config, "max_position_embeddings", None)
        return float("inf") if longest is None else longest - self._length

    @torch.no_grad()
    def read(self, token_ids: Sequence[int], depth: int = 0) -> Likely:
        """Reads further tokens, one at least; returns what is likely after them.

        `depth` is how many drafts the text has then. An id that the model lacks is read as its
        last one.
        """
        last = self._draft_model.config.vocab_size - 1
        known = [token if 0 <= token < last else last for token in token_ids]
        ids = upload(torch.tensor([known], device="cpu"), device_of(self._draft_model.model))
        for part in torch.split(ids, _CHUNK, dim=1):
            self._count_forward()
            logits = self._draft_model.forward(part, self._cache)
            self._length += part.shape[1]
        return self._draft_model.likely(logits, self._draws, depth)

    def crop(self, num_tokens: int) -> None:
        if num_tokens:
            self._length -= num_tokens
            self._cache.crop(-num_tokens)


class DraftModelCursor(Cursor):
    """The chain of one row.

    The model reads a token if its chance is at least the price of a forward, which `budget` says
    in tokens. A prompt is read on while drafts may lose that time, and if the rest of it costs no
    more than the `num_left` tokens to come.
    """

    takes_time = True
    evidence_against = AGAINST

    def __init__(
        self,
        text: DraftText,
        prompt_ids: Sequence[int],
        budget: TimeBudget,
        num_left: float = float("inf"),
        draws: Draws = Draws(),  # noqa: B008 has no state
        worth: SourceWorth | None = None,
    ) -> None:
        self._text = text
        self._budget = budget
        self._num_left = num_left
        self._draws = draws
        self._worth = SourceWorth(FULL_GAIN) if worth is None else worth
        self._may_run, self._num_forwards = True, 0  # In this step.
        self._part, self._per_token = _FIRST_PART, 0.0  # Tokens of the next; seconds in the last.
        self._unread = list(prompt_ids)  # Committed tokens.
        self._chain: list[int] = []
        # What the model named after the text, and after each token of the chain.
        self._named: list[list[Candidate]] = []

    def prepare(self) -> None:
        """Reads what is more than a few tokens, such as a prompt, while that is affordable."""
        self._may_run = self._worth.should_ask(self._budget)
        while len(self._unread) > _FEW and self._pays(1.0, len(self._unread)):
            num_tokens = min(self._part, len(self._unread))
            price = self._budget.break_even_tokens(self._per_token * len(self._unread))
            if price > self._num_left or not self._budget.affords(self._per_token * num_tokens):
                return
            start = perf_counter()
            self._read_unread(num_tokens)
            seconds = perf_counter() - start
            self._part, self._per_token = min(2 * self._part, _LONGEST_PART), seconds / num_tokens
            self._budget.charge(seconds)

    def root(self) -> Drafts:
        """The end of the text, which the model reads now."""
        if 0 < len(self._unread) <= _FEW and self._pays(1.0, len(self._unread)):
            with self._timed():
                self._read_unread(len(self._unread))
        return ()

    def follow(self, state: Drafts, token: int) -> Drafts | None:
        """Any token may be the chain's next one."""
        return (*state, token) if self._is_read(state) else None

    def read(self, state: Drafts, score: float) -> None:
        """Reads a token after the chain, which becomes its next one, if that pays."""
        if not state or len(state) != len(self._named) or not self._pays(score, 1):
            return
        with self._timed():
            likely = self._text.read(state[-1:], len(state))
        self._chain.append(state[-1])
        self._named.append(self._candidates(likely, len(state)))

    def expand(self, state: Drafts) -> list[Candidate]:
        """What the model named there, if it has read this far."""
        return self._named[len(state)] if self._is_read(state) else []

    def observe(self, record: StepRecord) -> None:
        """Keeps the part of the chain that became text, and its rest if all new text is in it."""
        if self._num_forwards:
            self._worth.observe(tokens=_num_brought(record) / self._num_forwards)
            self._num_forwards = 0
        committed, num_kept = record.committed_ids, 0
        self._num_left -= len(committed)
        for ours, theirs in zip(self._chain, committed, strict=False):
            if ours != theirs:
                break
            num_kept += 1
        if num_kept == len(committed):
            self._chain, self._named = self._chain[num_kept:], self._named[num_kept:]
            return
        self._text.crop(len(self._chain) - num_kept)
        self._unread += committed[num_kept:]
        self._chain, self._named = [], []

    def _is_read(self, state: Drafts) -> bool:
        return len(state) < len(self._named) and list(state) == self._chain[: len(state)]

    def _pays(self, chance: float, num_tokens: int) -> bool:
        is_worth_it = self._may_run and self._worth.pays(chance, self._budget)
        return num_tokens <= self._text.num_left and is_worth_it

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Inside is a forward over one token, or a few."""
        start = perf_counter()
        yield
        self._worth.observe(seconds=perf_counter() - start)
        self._num_forwards += 1

    def _read_unread(self, num_tokens: int) -> None:
        """Reads committed tokens; at their end it is known what may come next."""
        likely = self._text.read(self._unread[:num_tokens])
        self._unread = self._unread[num_tokens:]
        self._named = [] if self._unread else [self._candidates(likely, 0)]

    def _candidates(self, likely: Likely, depth: int) -> list[Candidate]:
        return named(likely, is_drawn=self._draws.noise(depth) is not None)


def _num_brought(record: StepRecord) -> int:
    """The accepted tokens that it named, and that no other source found likely."""
    return sum(
        DRAFT_MODEL in sources_of(kinds)
        and not any(k.rank == 1 and k.probability_bin < 2 for k in kinds if k.source != DRAFT_MODEL)
        for kinds in (record.tree.evidence[node] for node in record.accepted_nodes())
    )
