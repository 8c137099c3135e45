"""DIAA as its paper has it: exact probabilities, its tree's own decays and threshold.

The paper's figure 6 shows how a row changes: a token that is not there is added, and where the row
is full it replaces the least informative entry. Its text does not say which tokens of a verified
node that is meant for. If it is all K of them, the row is what the model said last: `DiaaSource`.
If it is the model's first choice alone, the others are added only while there is room:
`MergingSource`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.calibration import Calibration, Kinds
from selfspec.draft.sources import LutSource
from selfspec.records import Candidate, Evidence, StepRecord, TopK

# The decays and the threshold are those of the paper's figure 7, K is that of its experiments.
DIAA_KNOBS: dict[str, Any] = {
    "top_k": 8,
    "depth_decay": 0.8,
    "width_decay": 0.7,
    "threshold": 5e-3,
    "sources": ("lut",),
    "num_branches": 0,
}
_FINE = 4096  # A probability travels as a whole number of these parts.


class RecordedProbabilities(Calibration):
    """Believes the tables: nothing is counted."""

    @property
    def probability(self) -> Callable[[Kinds], float]:
        """What the p-LUT holds."""
        return lambda kinds: kinds[0].probability_bin / _FINE

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned from it."""


class DiaaSource(LutSource):
    """The LUT pair, with probabilities as they were recorded."""

    def copy(self) -> DiaaSource:
        """Never asked for: measured in one session."""
        raise NotImplementedError

    def next_tokens(self, pair: tuple[int, int]) -> list[Candidate]:
        """The row of the last token, likeliest first, with what the p-LUT holds."""
        with self.rows.lock:
            ids, chances = self.rows.token_ids[pair[1]], self.rows.probabilities[pair[1]]
            order = np.argsort(-chances, kind="stable")
            held = [(int(ids[i]), round(float(chances[i]) * _FINE)) for i in order if ids[i] >= 0]
        return [
            (candidate, Evidence(self.name, rank=rank, probability_bin=parts))
            for rank, (candidate, parts) in enumerate(held, start=1)
        ]


class MergingSource(DiaaSource):
    """Its rows change one entry at a time, and keep what they held before."""

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Each last token's newest top-K, one after the other."""
        with self.rows.lock:
            for token, ids, chances in zip(pairs[:, -1], top.ids, top.probabilities, strict=True):
                self._merge(int(token), ids, chances)

    def _merge(self, token: int, new_ids: NDArray[Any], new_chances: NDArray[Any]) -> None:
        ids, chances = self.rows.token_ids[token], self.rows.probabilities[token]
        for number, (new, chance) in enumerate(zip(new_ids, new_chances, strict=True)):
            if new < 0:
                continue
            at = np.flatnonzero(ids == new)
            if not at.size:
                at = np.flatnonzero(ids < 0)
            if at.size:
                place = at[0]
            elif number == 0:
                place = chances.argmin()
            else:
                continue
            ids[place], chances[place] = new, chance
