"""What drafts with a model have lost so far, and how much the next step may lose.

Text that no draft can guess, and steps whose cost is not known yet, must not make a call slower
than plain decoding by more than a little.
"""

from __future__ import annotations

# Drafts may lose 1.5 % of the decoding time, one plain step to find out what they bring, and up to
# eight plain steps of what they have saved: where a wrong chain is read again, losses are steep.
_SHARE, _STEPS, _CREDIT = 0.015, 1.0, 8.0

# At first scores are trusted as if ten promised drafts had all come true. Each promised draft
# leaves the earlier ones 98 % of their weight.
_PRIOR, _FADE = 10.0, 0.98

# How fast texts grow is believed to be one token in a plain step at first, as if 8 such steps had
# been seen. Each step leaves the earlier ones 95 % of their weight.
_LATELY, _FADE_OF_STEPS = 8.0, 0.95


class Ledger:
    """Counts, in plain steps, the time that drafts have saved; negative if they lost."""

    def __init__(self) -> None:
        self._taken = 0.0
        self._saved = 0.0
        self._promised = self._accepted = _PRIOR  # Drafts, the earlier ones with less weight.
        self._tokens = self._steps = _LATELY  # Tokens, and plain steps' time, likewise.

    @property
    def trust(self) -> float:
        """How much of what scores promise comes true."""
        return min(self._accepted / self._promised, 1.0)

    @property
    def rate(self) -> float:
        """The tokens that a row gets lately in the time of a plain step."""
        return self._tokens / self._steps

    def may_lose(self) -> float:
        """What the next step may lose, in plain steps."""
        return self._saved + _STEPS + _SHARE * self._taken

    def forgive(self) -> None:
        """Forgets a loss: steps cost something else from now on, so drafts may try anew."""
        self._saved = max(self._saved, 0.0)

    def observe(
        self, taken: float, saved: float, promised: float = 0.0, num_accepted: int = 0
    ) -> None:
        """Takes in what a step took, and what it saved against plain steps for its tokens.

        `promised` is the sum of the scores of its drafts, of which `num_accepted` were right.
        """
        self._taken += taken
        if (tokens := taken + saved) > 0:  # A source that only begins brings none.
            self._tokens = _FADE_OF_STEPS * self._tokens + tokens
            self._steps = _FADE_OF_STEPS * self._steps + taken
        self._saved = min(self._saved + saved, _CREDIT)
        weight = _FADE**promised
        self._promised = weight * self._promised + promised
        self._accepted = weight * self._accepted + num_accepted
