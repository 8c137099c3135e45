"""The few tokens that transformers' warpers leave to be drawn, without a look at all the others.

transformers warps a whole vocabulary for each token: sorts it, sums it up, rules out all but a
handful. On a CPU that takes as long as a part of the forward. The handful is known from the largest
scores alone, unless a value is so near to a threshold that rounding decides. Then transformers' own
warpers decide, so the answer is always the one that transformers would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.verify.logits import largest

# Tokens that are looked at beyond the K likeliest, since top-k keeps all that equal the K-th.
_SPARE = 14
# Tokens that are looked at if top-p or min-p decides what stays. For more, arrays are faster.
_WIDE = 256
# Tokens that are looked at if no warper rules any out.
_NARROW = 64
# A value within this share of a threshold is not sure: rounding moves it by about 1e-6.
_NEARLY = 1e-5
# The relative rounding error of a float32 sum for every token in it: half a unit an addition,
# in four lanes or more.
_OFF = 2.0**-26


Tokens = NDArray[np.int64]
Weights = NDArray[np.float64]


class Warpers(NamedTuple):
    """The arguments of transformers' warpers, in their order; None: it is not there."""

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
    num_seen = min(_num_looked_at(warpers), len(logits))
    if num_seen == 0:
        return None
    values, ids = largest(logits, num_seen)
    scores = _tempered(values, warpers).tolist()
    while scores and scores[-1] == -math.inf:  # Another processor ruled these out before.
        scores.pop()
    if not scores or not scores[0] < math.inf:  # transformers refuses NaN and infinity.
        return None
    sees_all = len(scores) < num_seen or num_seen == len(logits)
    if warpers.top_k:
        num_kept = _num_in_top_k(scores, warpers.top_k)
        if num_kept == len(scores) and not sees_all:
            return None
        del scores[num_kept:]
        sees_all = True
    weights = [math.exp(score - scores[0]) for score in scores]
    rest = None if sees_all else _Rest(logits, warpers, scores[0])
    num_kept = _num_by_probability(weights, warpers, rest)
    if num_kept < len(weights):
        rest = None
    if num_kept == 0 or (rest is not None and warpers.rules_out):
        return None
    return Shortlist(ids[:num_kept].tolist(), weights[:num_kept], rest)


def _num_looked_at(warpers: Warpers) -> int:
    """How many of the likeliest tokens to look at; 0: too many to be worth it."""
    if warpers.top_k:
        return warpers.top_k + _SPARE if warpers.top_k <= _WIDE else 0
    return _WIDE if warpers.rules_out else _NARROW


def _tempered(logits: torch.Tensor, warpers: Warpers) -> torch.Tensor:
    """Divided as transformers does, to the bit: what rounds alike is a tie."""
    return logits if warpers.temperature is None else logits / warpers.temperature


@dataclass
class _Rest:
    """The weights of tokens that were not looked at."""

    logits: torch.Tensor
    warpers: Warpers
    highest: float

    def __call__(self, tokens: Tokens) -> Weights:
        """e^score of some tokens, in relation to the likeliest one's."""
        scores = _tempered(self.logits[torch.from_numpy(tokens)], self.warpers).numpy()
        weights: Weights = np.subtract(scores, self.highest, dtype=np.float64)
        return np.exp(weights, out=weights)

    def total(self) -> float:
        """The sum of the weights of all tokens of the vocabulary."""
        return float((_tempered(self.logits, self.warpers) - self.highest).exp_().sum())


def _num_by_probability(weights: list[float], warpers: Warpers, rest: _Rest | None) -> int:
    """How many of the likeliest top-P and min-P leave; 0: not sure."""
    num_kept = len(weights)
    if warpers.top_p is not None:
        total, nearly = sum(weights), _NEARLY
        if rest is not None:
            # transformers compares the tail's sum with 1 - P, and rounds it over the whole
            # vocabulary.
            total = rest.total()
            nearly += (1 - warpers.top_p) * len(rest.logits) * _OFF
        num_kept = _num_in_top_p(weights, total * warpers.top_p, total * nearly)
    if warpers.min_p is not None:
        num_kept = min(num_kept, _num_above(weights, warpers.min_p))
    return num_kept


def _num_in_top_k(scores: list[float], top_k: int) -> int:
    """How many are not below the K-th."""
    num_kept = min(top_k, len(scores))
    while num_kept < len(scores) and scores[num_kept] == scores[top_k - 1]:
        num_kept += 1
    return num_kept


def _num_in_top_p(weights: list[float], limit: float, nearly: float) -> int:
    """How many have less than `limit` above them, the first one in any case; 0: not sure."""
    above = 0.0
    for index, weight in enumerate(weights):
        if index:
            if abs(above - limit) < nearly:
                return 0
            if above > limit:
                # Which of two equal ones comes first depends on how transformers sorts.
                return index if weight < weights[index - 1] * (1 - _NEARLY) else 0
        above += weight
    return len(weights)


def _num_above(weights: list[float], least: float) -> int:
    """How many are not below `least`, the first one in any case; 0: not sure."""
    for index, weight in enumerate(weights):
        if index and abs(weight - least) < _NEARLY * least:
            return 0
        if index and weight < least:
            return index
    return len(weights)
