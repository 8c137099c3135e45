"""What drafts with a model have saved so far, and how much the next step may lose.

Text that no draft can guess, and steps whose cost is not known yet, must not make a call slower
than plain decoding by more than a little.
"""

from __future__ import annotations

__all__ = ["Ledger"]

_SHARE = 0.01  # Of the decoding time, which drafts may lose.
_STEPS = 1.0  # Plain steps, which they may lose besides, to find out what they bring.
_CREDIT = 8  # Plain steps of earlier gains, at most, which they may lose again.


class Ledger:
    """Counts the seconds that drafts have saved against plain steps; negative if they lost."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self.saved = 0.0

    def room(self, plain_seconds: float) -> float:
        """What the next step may lose, in seconds; `plain_seconds` is what a plain step takes."""
        self.saved = min(self.saved, _CREDIT * plain_seconds)
        return self.saved + _STEPS * plain_seconds + _SHARE * self._seconds

    def observe(self, seconds: float, saved: float) -> None:
        """Takes in what a step took, and what it saved against plain steps for its tokens."""
        self._seconds += seconds
        self.saved += saved
