"""What noise makes of a chance: how likely a token is to be drawn, once its own q is known.

A token of chance p is drawn if no other token has a larger p / q. By its own q alone, the chance of
that is v = exp((p - 1)·q / p). As p is a guess, v says less than it seems to. How much it says is
counted over a grid of p and v: in each cell, how many came true of those that p alone promised.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import exp

# Where the rows and the columns of the grid begin.
_CHANCES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
_VALUES = (0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
_NUM_VALUES = len(_VALUES) + 1
# At first v is believed half, as if this many candidates had been seen.
_PRIOR, _BELIEF = 8.0, 0.5
# Each candidate leaves the earlier ones of its cell 99.9 % of their weight.
_FADE = 0.999

UNKNOWN = -1  # The cell of a candidate of whose noise nothing was asked.


class NoiseGrid:
    """Fading ratios by cell: what came true over what was promised.

    >>> grid = NoiseGrid()
    >>> little_noise, much_noise = grid.chance(0.3, 0.1)[0], grid.chance(0.3, 2.0)[0]
    >>> little_noise > 0.3 > much_noise
    True
    """

    def __init__(self) -> None:
        middles, values = _middles(_CHANCES), _middles(_VALUES)
        ratios = [1 + _BELIEF * (value / p - 1) for p in middles for value in values]
        self._promised = [_PRIOR * p for p in middles for _ in values]
        self._hits = [ratio * p for ratio, p in zip(ratios, self._promised, strict=True)]

    def chance(self, chance: float, noise: float) -> tuple[float, int]:
        """The chance of a token whose noise is known, and the cell in which that is counted."""
        value = exp((chance - 1) * noise / chance) if chance > 0 else 0.0
        cell = bisect_right(_CHANCES, chance) * _NUM_VALUES + bisect_right(_VALUES, value)
        return min(chance * self._hits[cell] / self._promised[cell], 1.0), cell

    def observe(self, cell: int, chance: float, is_hit: bool) -> None:
        """Takes in what came of a candidate that had this chance by its evidence alone."""
        self._promised[cell] = self._promised[cell] * _FADE + chance
        self._hits[cell] = self._hits[cell] * _FADE + is_hit

    def copy(self) -> NoiseGrid:
        twin = NoiseGrid()
        twin._promised, twin._hits = list(self._promised), list(self._hits)
        return twin


def _middles(edges: tuple[float, ...]) -> list[float]:
    bounds = (0.0, *edges, 1.0)
    return [(low + high) / 2 for low, high in pairwise(bounds)]
