"""Tokens that the model finds likely everywhere, and of these the ones that noise favours.

Where a text is sampled, a token may be drawn because its noise happens to be small. Of a few
hundred common tokens, the best p / q is drawn about as often as a token that a table names third.
Nothing is named where the next token is the likeliest one.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import COMMON, Candidate, Draws, Evidence, StepRecord, TopK

_NUM_COMMON = 512  # So many of the commonest tokens are looked at, and the best 6 are named.
_NUM_NAMED = 6
# Each lesson leaves the earlier ones 99 % of their weight. After 16, the commonest are looked for.
_FADE, _NUM_LESSONS = 0.99, 16
_HEAVIEST = 1e9
# What comes next is surer than what is common: p is common to the power of this / temperature.
_SURER = 1.4
# Evidence is how likely such a p is drawn with such noise. The bins begin here.
_VALUES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96)
_EVIDENCE = [
    Evidence(COMMON, count_bin=number, probability_bin=6 - min(number, 3))
    for number in range(len(_VALUES) + 1)
]

Common = tuple[NDArray[np.int64], NDArray[np.float64]]  # Tokens, and their shares of all.


class CommonSource(Source):
    """How likely each token was in what the model has predicted lately. Safe for several threads.

    Learns nothing before it is needed. Takes 8 bytes for each token of the vocabulary.
    """

    name = COMMON

    def __init__(self, vocab_size: int) -> None:
        self._sums = np.zeros(vocab_size)
        self._weight, self._num_lessons = 1.0, 0  # of the next lesson, and so far
        self._is_needed = False  # Was any row sampled?
        self.common: Common = (np.zeros(0, np.int64), np.zeros(0))
        self._lock = threading.Lock()

    def open(self, row: RowStart) -> CommonCursor | None:
        if row.draws.temperature is None:
            return None
        self._is_needed = True
        return CommonCursor(self, row.draws)

    def copy(self) -> CommonSource:
        twin = CommonSource(0)
        with self._lock:
            twin._sums, twin._weight = self._sums.copy(), self._weight
            twin._num_lessons, twin.common = self._num_lessons, self.common
            twin._is_needed = self._is_needed
        return twin

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        if not self._is_needed:
            return
        with self._lock:
            is_token = (top.ids >= 0) & (top.ids < len(self._sums))
            chances = top.probabilities[is_token].astype(np.float64)
            np.add.at(self._sums, top.ids[is_token], self._weight * chances)
            self._weight /= _FADE
            if self._num_lessons % _NUM_LESSONS == 0:
                self._find_common()
            self._num_lessons += 1

    def _find_common(self) -> None:
        """Costs a pass over the vocabulary."""
        if self._weight > _HEAVIEST:
            self._sums /= self._weight
            self._weight = 1.0
        number = min(_NUM_COMMON, len(self._sums))
        ids = np.argpartition(-self._sums, number - 1)[:number]
        ids = ids[self._sums[ids] > 0]
        self.common = ids, self._sums[ids] / self._sums.sum()


class CommonCursor(Cursor):
    """Names tokens at the end of one row's text; a state is whether it is there."""

    def __init__(self, source: CommonSource, draws: Draws) -> None:
        assert draws.temperature is not None
        self._source, self._draws = source, draws
        self._power = _SURER / draws.temperature
        self._common: Common | None = None
        self._chances = np.zeros(0)

    def root(self) -> bool:
        return True

    def expand(self, state: bool) -> list[Candidate]:
        """Costs some 30 µs."""
        ids, chances = self._latest()
        noise = self._draws.noise_of(ids, 0) if len(ids) > _NUM_NAMED else None
        if noise is None:
            return []
        ratios = noise / chances
        best = np.argpartition(ratios, _NUM_NAMED)[:_NUM_NAMED]
        values = np.exp((chances[best] - 1) * ratios[best])
        bins = np.searchsorted(_VALUES, values, side="right").tolist()
        return [(id_, _EVIDENCE[bin_]) for id_, bin_ in zip(ids[best].tolist(), bins, strict=True)]

    def _latest(self) -> Common:
        """The common tokens, and how likely each may be to come next."""
        common = self._source.common
        if self._common is not common:
            raised = common[1] ** self._power
            self._common, self._chances = common, np.maximum(raised / raised.sum(), 1e-12)
        return common[0], self._chances

    def observe(self, record: StepRecord) -> None:
        """Nothing to do: each step looks anew for what comes next."""
