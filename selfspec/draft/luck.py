"""Sampling's luck, known before the draw: which candidates the noise of a step favours.

A token is drawn where its probability over its noise is the highest. The noise is known ahead, the
probabilities only roughly. So how far the noise is trusted is learned, for each set of sources that
name the best candidate: of some ways to weigh it, the one that foretold the drawn tokens best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.records import Evidence, NoiseOf, Siblings

__all__ = ["NoiseTrust"]


class _Weighing(NamedTuple):
    """A candidate counts as probability ** sharpness / noise ** trust."""

    sharpness: float
    trust: float


_WEIGHINGS = (
    _Weighing(1.0, 0.0),
    _Weighing(1.0, 0.15),
    _Weighing(1.0, 0.3),
    _Weighing(1.0, 0.5),
    _Weighing(1.0, 0.75),
    _Weighing(1.0, 1.0),
    _Weighing(1.5, 1.5),
    _Weighing(2.5, 2.5),
)
# Before anything was drawn, a little trust is the best guess.
_FIRST = 2
_PRIOR = 0.5  # What each step away from that guess must gain, in nats.
# Each later draw leaves an earlier one this share of its weight.
_FADE = 0.99
# Some candidate that nobody named is at least so likely.
_LEAST_REST = 0.02
_LEAST_CHANCE = 1e-3
_LEAST_NOISE = 1e-9
# The noise of what nobody named, as a geometric mean: the Euler-Mascheroni constant.
_TYPICAL = math.exp(-0.5772)


class NoiseTrust:
    """Learns how far noise is to be trusted."""

    def __init__(self) -> None:
        self._start = [_PRIOR * abs(index - _FIRST) for index in range(len(_WEIGHINGS))]
        self._losses: dict[tuple[str, ...], list[float]] = {}

    def copy(self) -> NoiseTrust:
        """A copy that learns for one request alone."""
        twin = NoiseTrust()
        twin._losses = dict(self._losses)  # Each list is replaced whole and never changed.
        return twin

    def weighed(self, siblings: Siblings, noise_of: NoiseOf) -> Siblings:
        """The candidates with their chances, now that their noise is known; best first."""
        if not siblings.tokens:
            return siblings
        noise = [noise_of(token) for token in siblings.tokens]
        losses = self._losses.get(_group(siblings.evidence[0]), self._start)
        weighing = _WEIGHINGS[losses.index(min(losses))]
        chances = _chances(siblings.probabilities, noise, weighing)
        order = sorted(range(len(noise)), key=lambda i: -chances[i])
        return Siblings(
            [siblings.tokens[i] for i in order],
            [chances[i] for i in order],
            [siblings.evidence[i] for i in order],
            [noise[i] for i in order],
            [siblings.probabilities[i] for i in order],
        )

    def observe(self, siblings: Siblings, token: int) -> None:
        """Learns which token was drawn, of the candidates or none of them."""
        noise, probabilities = siblings.noise, siblings.before_noise
        if noise is None or probabilities is None:
            return
        tokens = siblings.tokens
        index = tokens.index(token) if token in tokens else -1
        best = max(range(len(tokens)), key=probabilities.__getitem__)
        group = _group(siblings.evidence[best])
        self._losses[group] = [
            _FADE * loss
            - math.log(max(_chances(probabilities, noise, weighing)[index], _LEAST_CHANCE))
            for loss, weighing in zip(self._losses.get(group, self._start), _WEIGHINGS, strict=True)
        ]


def _group(kinds: Sequence[Evidence]) -> tuple[str, ...]:
    """The sources that name a candidate: what they know of its probability is alike."""
    return tuple(kind.source for kind in kinds)


def _chances(
    probabilities: Sequence[float], noise: Sequence[float], weighing: _Weighing
) -> Sequence[float]:
    """The chance of each candidate, and at the end that of all that nobody named."""
    sharpness, trust = weighing
    rest = max(1 - sum(probabilities), _LEAST_REST)
    weights = [
        probability**sharpness * max(number, _LEAST_NOISE) ** -trust
        for probability, number in zip(probabilities, noise, strict=True)
    ]
    weights.append(rest**sharpness * _TYPICAL**-trust)
    total = sum(weights)
    return [weight / total for weight in weights]
