"""Whether a source that takes seconds of its own brings as many tokens as they cost."""

from __future__ import annotations

from collections import deque
from statistics import median

from selfspec.records import TimeBudget

_NUM_TIMED, _NUM_FIRST = 5, 3  # Asking takes the median of the last five times, of three at least.
_GAIN = 0.2  # A source is believed to bring this many tokens a step at first.
_MEMORY = 64  # What it brings comes in few steps, so that the mean follows this many.
_PATIENCE = 256  # A source that has not paid for so many steps is timed and believed anew.


class SourceWorth:
    """The tokens that a source brings with one model, and the time that it takes to be asked."""

    def __init__(self, gain: float = _GAIN) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMED)
        self._gain = self._tokens = gain
        self._num_refused = 0  # The steps since it last paid.

    def observe(self, *, seconds: float | None = None, tokens: float | None = None) -> None:
        """Takes in what it took when it was asked, or what it brought, or both."""
        if seconds is not None:
            self._seconds.append(seconds)
        if tokens is not None:
            self._tokens += (tokens - self._tokens) / _MEMORY

    def pays(self, budget: TimeBudget, chance: float = 1.0) -> bool:
        """Is it worth asking, if what it brings is used by chance? It is, until it was timed.

        That is as long as drafts may lose.
        """
        is_known = len(self._seconds) >= _NUM_FIRST
        seconds = median(self._seconds) if is_known else 0.0  # First times may be slow.
        is_enough = chance * self._tokens >= budget.break_even_tokens(seconds)
        return is_enough and (is_known or budget.affords(0.0))

    def should_ask(self, budget: TimeBudget) -> bool:
        """Are rows to ask it in the next step? To be called once for each step.

        A step that brings many tokens raises the price of time for a while. So what does not pay
        in one step may pay in the next.
        """
        if self.pays(budget):
            self._num_refused = 0
            return True
        if len(self._seconds) >= _NUM_FIRST:
            self._num_refused += 1
        if self._num_refused == _PATIENCE:
            self._seconds.clear()
            self._tokens, self._num_refused = self._gain, 0
        return False
