"""What drafts with a model have saved so far, and how much they may still lose.

Text that no draft can guess, and forwards whose cost is not known yet, must not make a call slower
than plain decoding by more than a little.
"""

from __future__ import annotations

__all__ = ["Ledger"]

_SHARE = 0.02  # of the decoding time, which drafts may lose
_STEPS = 1.0  # plain steps, which they may lose besides, to find out what they bring
_CREDIT = 8  # plain steps of earlier gains, at most, which they may lose again


class Ledger:
    """Counts the seconds that drafts have saved against plain steps; negative if they lost."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._saved = 0.0

    def may_lose(self, plain_seconds: float) -> bool:
        """May the next step draft? `plain_seconds` is what a plain step takes."""
        self._saved = min(self._saved, _CREDIT * plain_seconds)
        return self._saved > -(_STEPS * plain_seconds + _SHARE * self._seconds)

    def observe(self, seconds: float, saved: float) -> None:
        """Takes in what a step took, and what it saved against plain steps for its tokens."""
        self._seconds += seconds
        self._saved += saved
