"""From evidence to the probability that such a candidate is accepted.

Every kind of evidence has a fading hit rate that starts from a prior and is corrected by what
was accepted. Where several sources name a token, their joint evidence is a kind of its own: what
two sources know is never independent, and how far they reinforce each other is counted, not
assumed. Knows nothing of tokens: only evidence and whether it came true.
"""

from __future__ import annotations

import copy
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import exp
from typing import Any

from selfspec.records import DRAFT_MODEL, Evidence, Siblings, StepRecord

# A prior counts as much as this many trials.
PRIOR_WEIGHT = 4.0
# A cache keeps at most this many rates.
_MAX_ROWS = 2048
# With more than 8,192 in memory, all but the 2,048 that were tried most are forgotten.
_MOST_ROWS = 4 * _MAX_ROWS
# Each trial leaves the earlier ones of its kind 99.8 % of their weight.
_FADE = 0.998

# Where the rows and the columns of the grid begin.
_CHANCES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
_VALUES = (0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
_NUM_VALUES = len(_VALUES) + 1
# At first v is believed half, as if this many candidates had been seen.
_CELL_PRIOR, _BELIEF = 8.0, 0.5
# Each candidate leaves the earlier ones of its cell 99.9 % of their weight.
_CELL_FADE = 0.999

UNKNOWN = -1  # The cell of a candidate of whose noise nothing was asked.

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
        twin = copy.copy(self)  # Subclasses may have other arguments.
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


class NoiseGrid:
    """What noise makes of a chance: how likely a token is to be drawn, once its own q is known.

    A token of chance p is drawn if no other token has a larger p / q. By its own q alone, the
    chance of that is v = exp((p - 1)·q / p). As p is a guess, v says less than it seems to. How
    much it says is counted over a grid of p and v: in each cell, how many came true, over how many
    p alone promised, with fading.

    >>> grid = NoiseGrid()
    >>> little_noise, much_noise = grid.chance(0.3, 0.1)[0], grid.chance(0.3, 2.0)[0]
    >>> little_noise > 0.3 > much_noise
    True
    """

    def __init__(self) -> None:
        middles, values = _middles(_CHANCES), _middles(_VALUES)
        ratios = [1 + _BELIEF * (value / p - 1) for p in middles for value in values]
        self._promised = [_CELL_PRIOR * p for p in middles for _ in values]
        self._hits = [ratio * p for ratio, p in zip(ratios, self._promised, strict=True)]

    def chance(self, chance: float, noise: float) -> tuple[float, int]:
        """The chance of a token whose noise is known, and the cell in which that is counted."""
        value = exp((chance - 1) * noise / chance) if chance > 0 else 0.0
        cell = bisect_right(_CHANCES, chance) * _NUM_VALUES + bisect_right(_VALUES, value)
        return min(chance * self._hits[cell] / self._promised[cell], 1.0), cell

    def observe(self, cell: int, chance: float, is_hit: bool) -> None:
        """Takes in what came of a candidate that had this chance by its evidence alone."""
        self._promised[cell] = self._promised[cell] * _CELL_FADE + chance
        self._hits[cell] = self._hits[cell] * _CELL_FADE + is_hit

    def copy(self) -> NoiseGrid:
        twin = NoiseGrid()
        twin._promised, twin._hits = list(self._promised), list(self._hits)
        return twin


def _middles(edges: tuple[float, ...]) -> list[float]:
    bounds = (0.0, *edges, 1.0)
    return [(low + high) / 2 for low, high in pairwise(bounds)]
