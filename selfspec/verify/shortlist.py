"""The few tokens that stock's warpers leave to be drawn, found without a look at all the others.

Stock warps a whole vocabulary for each token: sorts it, sums it up, rules out all but a handful.
On a CPU that takes as long as a part of the forward. The handful is known from the largest scores
alone, up to cases so near to a threshold that it hangs on how sums were rounded. Of those nothing
is said, and stock's own warpers decide; so what is said here is what stock would say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.verify.logits import largest

__all__ = ["Shortlist", "Tokens", "Warpers", "Weights", "shortlist"]

_SPARE = 14  # looked at beyond the K likeliest, since all that equal the last of them stay
_WIDE = 256  # looked at where only probabilities tell what stays; with more, arrays are faster
_NARROW = 64  # looked at where nothing is ruled out
_NEARLY = 1e-5  # of a threshold: roundings move what is compared by some 1e-6 at most
_OFF = 2.0**-26  # of a float32 sum, for each token: half a step an addition, four lanes or more


Tokens = NDArray[np.int64]
Weights = NDArray[np.float64]


class Warpers(NamedTuple):
    """The arguments of stock's warpers in stock's order; None: it is not there."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @property
    def rules_out(self) -> bool:
        """Is there one that rules tokens out?"""
        return any(value is not None for value in self[1:])


class Shortlist(NamedTuple):
    """The tokens that may be drawn, likeliest first, and e^score of each, the first one's 1.

    `rest` gives the weights of others that may be drawn, too: none is above the last one here.
    """

    tokens: list[int]
    weights: list[float]
    rest: Callable[[Tokens], Weights] | None = None


def shortlist(logits: torch.Tensor, warpers: Warpers) -> Shortlist | None:
    """What the warpers leave of float32 `logits` (V,) on a CPU; None where that is not sure.

    >>> shortlist(torch.tensor([0.0, 3.0, 2.0, 1.0]), Warpers(top_k=2)).tokens
    [1, 2]
    """
    num_tokens = len(logits)
    num_seen = min(_num_looked_at(warpers), num_tokens)
    if num_seen == 0:
        return None
    values, ids = largest(logits, num_seen)
    scores = _tempered(values, warpers).tolist()
    while scores and scores[-1] == -math.inf:  # ruled out before
        scores.pop()
    if not scores or not scores[0] < math.inf:  # stock says what is wrong with NaN and infinity
        return None
    sees_all = len(scores) < num_seen or num_seen == num_tokens
    if warpers.top_k:
        num_kept = _num_in_top_k(scores, warpers.top_k)
        if num_kept == len(scores) and not sees_all:
            return None
        del scores[num_kept:]
        sees_all = True
    weights = [math.exp(score - scores[0]) for score in scores]
    num_kept = len(scores)
    if warpers.top_p is not None:
        total = sum(weights) if sees_all else _total_weight(logits, warpers, scores[0])
        # stock compares what is below with 1 - P, and its sum over the rest is off by as much
        nearly = _NEARLY + (0 if sees_all else (1 - warpers.top_p) * num_tokens * _OFF)
        num_kept = _num_in_top_p(weights, total * warpers.top_p, total * nearly)
    if warpers.min_p is not None:
        num_kept = min(num_kept, _num_above(weights, warpers.min_p))
    rest = None
    if num_kept == len(weights) and not sees_all:
        if warpers.rules_out:
            return None
        rest = partial(_weights_of, logits, warpers, scores[0])
    return Shortlist(ids[:num_kept].tolist(), weights[:num_kept], rest) if num_kept else None


def _num_looked_at(warpers: Warpers) -> int:
    """0: too many."""
    if warpers.top_k:
        return warpers.top_k + _SPARE if warpers.top_k <= _WIDE else 0
    return _WIDE if warpers.rules_out else _NARROW


def _tempered(logits: torch.Tensor, warpers: Warpers) -> torch.Tensor:
    """Divided as stock does, to the bit: what rounds alike is a tie."""
    return logits if warpers.temperature is None else logits / warpers.temperature


def _total_weight(logits: torch.Tensor, warpers: Warpers, highest: float) -> float:
    return float((_tempered(logits, warpers) - highest).exp_().sum())


def _weights_of(logits: torch.Tensor, warpers: Warpers, highest: float, tokens: Tokens) -> Weights:
    scores = _tempered(logits[torch.from_numpy(tokens)], warpers).numpy()
    weights: Weights = np.subtract(scores, highest, dtype=np.float64)
    return np.exp(weights, out=weights)


def _num_in_top_k(scores: list[float], top_k: int) -> int:
    """How many are not below the K-th."""
    num_kept = min(top_k, len(scores))
    while num_kept < len(scores) and scores[num_kept] == scores[top_k - 1]:
        num_kept += 1
    return num_kept


def _num_in_top_p(weights: list[float], limit: float, nearly: float) -> int:
    """How many have less than `limit` above them, the first one in any case; 0: not sure."""
    above = 0.0
    for place, weight in enumerate(weights):
        if place:
            if abs(above - limit) < nearly:
                return 0
            if above > limit:  # of equal ones, which comes first hangs on how stock sorts
                return place if weight < weights[place - 1] * (1 - _NEARLY) else 0
        above += weight
    return len(weights)


def _num_above(weights: list[float], least: float) -> int:
    """How many are not below `least`, the first one in any case; 0: not sure."""
    for place, weight in enumerate(weights):
        if place and abs(weight - least) < _NEARLY * least:
            return 0
        if place and weight < least:
            return place
    return len(weights)
