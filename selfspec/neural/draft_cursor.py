"""A model that drafts, for one row: it reads drafted paths, and names what may come after them.

A path is read where that pays: if the next token after it is likely enough to be the model's, for
what a forward takes. What is named has its margin as evidence.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from selfspec.draft.sources.source import Cursor, RowStart
from selfspec.draft.sources.worth import SourceWorth
from selfspec.records import (
    DRAFT_MODEL,
    MAX_BIN,
    Candidate,
    Draws,
    Evidence,
    Likely,
    StepRecord,
    TimeBudget,
)

if TYPE_CHECKING:
    import torch

Path = tuple[int, ...]  # The drafted tokens after the committed text.

# A margin is how many times as large the best p / q is as another one; its log, in halvings.
_MARGINS = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
_TINY = 1e-30  # No weight is smaller.
_FARTHEST = 7.0  # What is farther behind the best one is not named.
# A model that drafts is believed to name the right token first, until that was counted.
FULL_GAIN = 1.0


class DraftText(Protocol):
    """One row's text, as a drafting model reads it."""

    def prepare(self, budget: TimeBudget) -> None:
        """Reads what takes long, such as a prompt, before a step."""
        ...

    def read(self, path: Path) -> torch.Tensor | None:
        """The logits (V,) after a path, which ends where it reads; None where it can't read."""
        ...

    def observe(self, committed: Sequence[int]) -> None:
        """The text has gone on by some tokens, and drafts were dropped."""
        ...


class DraftCursor(Cursor):
    """What a model names after each path that it has read; a state is a path.

    `worth` is that of its forwards, in all texts: what they take, and how often the token that they
    name first is right. A path is read if that chance is at least the price of a forward, which the
    budget says in tokens.
    """

    takes_time = True
    # What the model does not name after a path that it has read is unlikely.
    evidence_against: Evidence | None = Evidence(DRAFT_MODEL, rank=0, probability_bin=MAX_BIN)

    def __init__(self, text: DraftText, row: RowStart, top_k: int, worth: SourceWorth) -> None:
        self._text, self._top_k, self._worth = text, top_k, worth
        self._budget, self._draws = row.budget, row.draws
        self._may_run = True  # In this step.
        self._named: dict[Path, list[Candidate]] = {}

    def prepare(self) -> None:
        self._may_run = self._worth.should_ask(self._budget)
        if self._may_run:
            self._text.prepare(self._budget)

    def root(self) -> Path:
        return ()

    def follow(self, state: Path, token: int) -> Path:
        return (*state, token)

    def read(self, state: Path, score: float) -> None:
        """Reads a path to its end, if that pays."""
        is_worth_it = self._may_run and self._worth.pays(self._budget, score)
        if state in self._named or not is_worth_it:
            return
        start = perf_counter()
        logits = self._text.read(state)
        if logits is not None:
            self._named[state] = self.named(logits, len(state))
            self._worth.observe(seconds=perf_counter() - start)

    def named(self, logits: torch.Tensor, depth: int) -> list[Candidate]:
        """The candidates after so many drafts, by the logits (V,) there."""
        likely = ranked(logits, self._top_k, self._draws, depth)
        return with_margins(likely, is_drawn=self._draws.noise(depth) is not None)

    def expand(self, state: Path) -> list[Candidate]:
        return self._named.get(state, [])

    def observe(self, record: StepRecord) -> None:
        """Counts how often it was right; what it has named after the new text stays."""
        committed = tuple(record.committed_ids)
        for end, token in enumerate(committed[: len(record.path)]):
            if candidates := self._named.get(committed[:end]):
                self._worth.observe(tokens=candidates[0][0] == token)
        num = len(committed)
        self._named = {
            path[num:]: candidates
            for path, candidates in self._named.items()
            if path[:num] == committed
        }
        self._text.observe(committed)


def ranked(logits: torch.Tensor, num: int, draws: Draws, depth: int) -> Likely:
    """The tokens that a model would choose or draw by `logits` (V,), with the weight of each.

    Where the noise to come is known, they are ranked by p / q, else by p.
    """
    likely = draws.ranked(logits, depth)
    if likely is None:
        top = logits.float().topk(min(num, len(logits)))
        weights = (top.values - top.values[0]).exp().nan_to_num(0.0)
        likely = list(zip(top.indices.tolist(), weights.tolist(), strict=True))
    return likely[:num]


def with_margins(likely: Likely, *, is_drawn: bool) -> list[Candidate]:
    """The candidates that a model names, the first one likeliest, with its margin as evidence.

    Evidence stands for a chance before anything was counted. These chances lie between those of
    SmolLM2's copy in 4 bits, which is nearly always right, and of the same with permuted inputs.
    """
    halvings = [math.log2(max(weight, _TINY)) for _, weight in likely]
    candidates = []
    for rank, (token, _) in enumerate(likely, 1):
        behind = halvings[0] - halvings[rank - 1]
        if rank == 1:
            ahead = halvings[0] - halvings[1] if len(halvings) > 1 else math.inf
            match_length = 2 + 3 * bisect_right(_MARGINS, ahead) // 2
            evidence = Evidence(DRAFT_MODEL, match_length, 1, int(is_drawn))
        elif behind <= _FARTHEST:
            halved = min(rank + 2 * int(behind), MAX_BIN)
            evidence = Evidence(DRAFT_MODEL, 0, rank, int(is_drawn), halved)
        else:
            break
        candidates.append((token, evidence))
    return candidates
