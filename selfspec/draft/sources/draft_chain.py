"""A small model's guesses: a chain of tokens, with what it thinks likely after each of them.

The chain grows while a tree does: where children are wanted of a token after its last one, one
forward of the small model reads this token, if it is likely enough to be accepted. Knows tokens and
probabilities; the model itself is hidden by `ModelText`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from time import perf_counter
from typing import Protocol

from selfspec.draft.sources.source import Cursor, TimeBudget
from selfspec.draft.sources.worth import SourceWorth
from selfspec.records import DRAFT_MODEL, MAX_BIN, Candidate, Evidence, Likely, StepRecord, halvings

# The bins of chances begin at 0.97, 0.9, 0.75, 0.5, and then at each half of the one before.
_SURE = (0.75, 0.9, 0.97)
_LEAST = 1 / 128
# More than 16 unread tokens are read before a step, in parts of 32, 64, 128, 256 and 512 tokens.
# Each part's time tells what the next one will take.
_FEW, _FIRST_PART, _LONGEST_PART = 16, 32, 512

# The tokens after the committed text.
Drafts = tuple[int, ...]


class ModelText(Protocol):
    """A text as a model has read it."""

    @property
    def room(self) -> float:
        """How many tokens the model can still read."""
        ...

    def read(self, token_ids: Sequence[int]) -> Likely:
        """Reads further tokens, one at least; returns what is likely after them."""
        ...

    def crop(self, num_tokens: int) -> None:
        """Forgets the last tokens that were read."""
        ...


class DraftModelCursor(Cursor):
    """The chain of one row.

    The model reads a token if its chance is at least the price of a forward, which `budget` says
    in tokens. A prompt is read on while drafts may lose that time, and if the rest of it costs no
    more than the `num_left` tokens to come.
    """

    # What the model does not name after a token that it has read is unlikely.
    evidence_against = Evidence(DRAFT_MODEL, rank=0, probability_bin=MAX_BIN)
    reads_ahead = True

    def __init__(
        self,
        text: ModelText,
        prompt_ids: Sequence[int],
        budget: TimeBudget,
        num_left: float = float("inf"),
    ) -> None:
        self._text = text
        self._budget = budget
        self._num_left = num_left
        self._worth = SourceWorth()  # of forwards over one token
        self._part, self._per_token = _FIRST_PART, 0.0  # Tokens of the next; seconds in the last.
        self._unread = list(prompt_ids)  # Committed tokens.
        self._chain: list[int] = []
        # What the model named after the text, and after each token of the chain.
        self._named: list[list[Candidate]] = []

    def prepare(self) -> None:
        """Reads what is more than a few tokens, such as a prompt, while that is affordable."""
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
            self._read_unread(len(self._unread))
        return ()

    def follow(self, state: Drafts, token: int) -> Drafts | None:
        """Any token may be the chain's next one."""
        return (*state, token) if self._is_read(state) else None

    def read(self, state: Drafts, score: float) -> None:
        """Reads a token after the chain, which becomes its next one, if that pays."""
        if not state or len(state) != len(self._named) or not self._pays(score, 1):
            return
        start = perf_counter()
        likely = self._text.read(state[-1:])
        self._worth.observe(seconds=perf_counter() - start)
        self._chain.append(state[-1])
        self._named.append(_candidates(likely))

    def expand(self, state: Drafts) -> list[Candidate]:
        """What the model named there, if it has read this far."""
        return self._named[len(state)] if self._is_read(state) else []

    def observe(self, record: StepRecord) -> None:
        """Keeps the part of the chain that became text, and its rest if all new text is in it."""
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
        is_worth_it = self._worth.pays(chance, self._budget.break_even_tokens)
        return num_tokens <= self._text.room and is_worth_it

    def _read_unread(self, num_tokens: int) -> None:
        """Reads committed tokens; at their end it is known what may come next."""
        likely = self._text.read(self._unread[:num_tokens])
        self._unread = self._unread[num_tokens:]
        self._named = [] if self._unread else [_candidates(likely)]


def _candidates(likely: Likely) -> list[Candidate]:
    return [
        (token, _evidence(rank, *bins(chance)))
        for rank, (token, chance) in enumerate(likely, 1)
        if chance >= _LEAST
    ]


def bins(chance: float) -> tuple[int, int]:
    """How many times a probability is halved, and how many of the sure bounds it reaches.

    >>> bins(0.95), bins(0.5), bins(0.2)
    ((0, 2), (1, 0), (2, 0))
    """
    return halvings(chance), sum(chance >= bound for bound in _SURE)


@lru_cache(maxsize=1024)
def _evidence(rank: int, probability_bin: int, sureness: int) -> Evidence:
    return Evidence(DRAFT_MODEL, 0, rank, sureness, probability_bin)
