"""What drafts with a model have saved so far, and how much the next step may lose.

Text that no draft can guess, and steps whose cost is not known yet, must not make a call slower
than plain decoding by more than a little.
"""

from __future__ import annotations

# Drafts may lose 1.5 % of the decoding time, one plain step to find out what they bring, and up to
# eight plain steps of what they have saved.
_SHARE, _STEPS, _CREDIT = 0.015, 1.0, 8
# At first scores are trusted as if ten promised drafts had all come true.
_PRIOR = 10.0
# Each step, or each promised draft, leaves the earlier ones 98 % of their weight.
_FADE = 0.98


class MeanRatio:
    """A fading mean of a quotient, such as seconds for each token.

    Starts from a `value` that counts as much as a `weight` of steps or tokens.
    """

    def __init__(self, value: float, *, weight: float) -> None:
        self._sum, self._weight = value * weight, weight

    @property
    def value(self) -> float:
        return self._sum / self._weight

    def observe(self, amount: float, count: float) -> None:
        kept = _FADE**count
        self._sum = self._sum * kept + amount
        self._weight = self._weight * kept + count


class Ledger:
    """Counts, in plain steps, the time that drafts have saved; negative if they lost.

    `kept` is how many drafts were accepted of those that their scores promised.
    """

    def __init__(self) -> None:
        self._taken = 0.0
        self._saved = 0.0
        self.kept = MeanRatio(1.0, weight=_PRIOR)

    @property
    def trust(self) -> float:
        """How much of what scores promise comes true."""
        return min(self.kept.value, 1.0)

    def may_lose(self) -> float:
        """What the next step may lose, in plain steps."""
        self._saved = min(self._saved, _CREDIT)
        return self._saved + _STEPS + _SHARE * self._taken

    def forgive(self) -> None:
        """Forgets a loss: steps cost something else from now on, so drafts may try anew."""
        self._saved = max(self._saved, 0.0)

    def observe(self, taken: float, saved: float) -> None:
        """Takes in what a step took, and what it saved against plain steps for its tokens."""
        self._taken += taken
        self._saved += saved
