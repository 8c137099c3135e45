"""Fading means."""

from __future__ import annotations

__all__ = ["MeanRatio"]

# Each later step leaves an earlier one this share of its weight.
_FADE = 0.95
# What is assumed at first counts as much as this many steps or tokens.
_PRIOR_WEIGHT = 4.0


class MeanRatio:
    """A fading mean of a quotient, such as seconds for each token."""

    def __init__(self, value: float, weight: float = _PRIOR_WEIGHT) -> None:
        self._sum, self._weight = value * weight, weight

    @property
    def value(self) -> float:
        """The quotient now."""
        return self._sum / self._weight

    def observe(self, amount: float, count: float) -> None:
        """Takes in an amount for a count."""
        self._sum = self._sum * _FADE + amount
        self._weight = self._weight * _FADE + count
