"""Fading means of quotients."""

from __future__ import annotations

__all__ = ["MeanRatio"]


class MeanRatio:
    """A fading mean of a quotient, such as seconds for each token.

    Starts from a `value` that counts as much as a `weight` of steps or tokens. Each later one
    leaves an earlier one the share `fade` of its weight.
    """

    def __init__(self, value: float, *, weight: float, fade: float) -> None:
        self._sum, self._weight, self._fade = value * weight, weight, fade

    @property
    def value(self) -> float:
        """The quotient now."""
        return self._sum / self._weight

    def observe(self, amount: float, count: float) -> None:
        """Takes in an amount for a count."""
        kept = self._fade**count
        self._sum = self._sum * kept + amount
        self._weight = self._weight * kept + count
