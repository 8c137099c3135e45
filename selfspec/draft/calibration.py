"""From evidence to the probability that such a candidate is accepted.

Every kind of evidence has a fading hit rate that starts from a prior and is corrected by what
was accepted. Where several sources name a token, their joint evidence is a kind of its own: what
two sources know is never independent, and how far they reinforce each other is counted, not
assumed. Knows nothing of tokens: only evidence and whether it came true.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from selfspec.draft.drawn import UNKNOWN, NoiseGrid
from selfspec.records import DRAFT_MODEL, Evidence, Siblings, StepRecord

# A prior counts as much as this many trials.
PRIOR_WEIGHT = 4.0
# A cache keeps at most this many rates.
_MAX_ROWS = 2048
# With more than 8,192 in memory, all but the 2,048 that were tried most are forgotten.
_MOST_ROWS = 4 * _MAX_ROWS
# Each trial leaves the earlier ones of its kind 99.8 % of their weight.
_FADE = 0.998

# The evidence of each source that names a token, in the order of the sources.
JointEvidence = tuple[Evidence, ...]
# Hits and trials.
_Rate = tuple[float, float]


def prior(evidence: Evidence) -> float:
    """The probability assumed before anything was counted.

    For a recorded probability: the middle of its bin. For a match: the longer, the surer, and
    less so for the lower ranks, or by the share that was counted there.
    """
    share: float = 0.5**evidence.probability_bin
    if evidence.match_length == 0:
        return 0.7 * share
    of_length: float = 1 - 0.75 * 0.7 ** (evidence.match_length - 1)
    return of_length * min(share, 0.4 ** (evidence.rank - 1))


class _Chances(dict[JointEvidence, float]):
    """What was counted of each kind of evidence, and the prior of single ones; others are guessed.

    Joint evidence that is new starts from its surest part. Where a draft model names the token, it
    starts from that one: the model sees the text that others count.
    """

    def __init__(self, prior: Callable[[Evidence], float]) -> None:
        super().__init__()
        self._prior = prior

    def __missing__(self, kinds: JointEvidence) -> float:
        if len(kinds) == 1:
            return self.setdefault(kinds, self._prior(kinds[0]))
        if kinds[-1].source == DRAFT_MODEL:
            return self[kinds[-1:]]
        return max(self[(kind,)] for kind in kinds)


class Calibration:
    """Fading hit rates by kind of evidence. Safe to read and write from several threads."""

    def __init__(self, prior: Callable[[Evidence], float] = prior) -> None:
        self._prior = prior
        self._chances = _Chances(prior)
        self._rates: dict[JointEvidence, _Rate] = {}
        self.grid: NoiseGrid | None = NoiseGrid()
        self._lock = threading.Lock()

    @property
    def probability(self) -> Callable[[JointEvidence], float]:
        """Tells how often such a candidate came true, or is guessed to; one look-up."""
        return self._chances.__getitem__

    def observe(self, record: StepRecord) -> None:
        """Counts the candidates below each accepted node: only there is the truth known."""
        with self._lock:
            for node, token in zip(record.path, record.committed_ids, strict=False):
                siblings = record.tree.looked_at[node]
                if siblings is None:
                    continue
                self._observe_noise(siblings, token)
                for candidate, kinds in zip(siblings.tokens, siblings.evidence, strict=True):
                    rate = self._rates.get(kinds)
                    hits, trials = rate or (self._chances[kinds] * PRIOR_WEIGHT, PRIOR_WEIGHT)
                    self._count(kinds, hits * _FADE + (candidate == token), trials * _FADE + 1)
            if len(self._rates) > _MOST_ROWS:
                self._forget_rare()

    def _observe_noise(self, siblings: Siblings, token: int) -> None:
        parts = siblings.cells, siblings.tokens, siblings.evidence
        for cell, candidate, kinds in zip(*parts, strict=False):
            if self.grid is not None and cell != UNKNOWN:
                self.grid.observe(cell, self._chances[kinds], candidate == token)

    def copy(self) -> Calibration:
        twin = copy.copy(self)  # Of its own class, whatever that was made with.
        twin._lock, twin._chances = threading.Lock(), _Chances(self._prior)
        with self._lock:
            twin._rates = dict(self._rates)
            twin._chances.update(self._chances)
            twin.grid = None if self.grid is None else self.grid.copy()
        return twin

    def rows(self) -> list[list[Any]]:
        """The rates that were tried most, as plain lists, sorted: [[evidence, …], hits, trials].

        Rates with few trials are worth little and make a cache slow to open.
        """
        with self._lock:
            items = sorted(self._rates.items(), key=lambda item: (-item[1][1], item[0]))
        kept = sorted(items[:_MAX_ROWS])
        return [[[list(e) for e in kinds], hits, trials] for kinds, (hits, trials) in kept]

    def restore(self, rows: Iterable[Sequence[Any]]) -> None:
        with self._lock:
            for parts, hits, trials in rows:
                self._count(tuple(Evidence(*part) for part in parts), hits, trials)
            if len(self._rates) > _MOST_ROWS:
                self._forget_rare()

    def _count(self, kinds: JointEvidence, hits: float, trials: float) -> None:
        self._rates[kinds] = (hits, trials)
        self._chances[kinds] = hits / trials

    def _forget_rare(self) -> None:
        """Leaves the rates that were tried most."""
        tried = sorted(self._rates.items(), key=lambda item: -item[1][1])
        self._rates = dict(tried[:_MAX_ROWS])
        for kinds in list(self._chances):
            if kinds not in self._rates:
                self._chances.pop(kinds, None)


class FixedPrior(Calibration):
    """Keeps to its prior: nothing is counted, and no noise is looked at."""

    def __init__(self, prior: Callable[[Evidence], float] = prior) -> None:
        super().__init__(prior)
        self.grid = None

    def observe(self, record: StepRecord) -> None:
        """Learns nothing."""

    def restore(self, rows: Iterable[Sequence[Any]]) -> None:
        """Leaves what a cache has counted where it is."""
