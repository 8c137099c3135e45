"""Whether a source that takes seconds of its own brings as many tokens as they cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

_NUM_TIMED, _NUM_FIRST = 5, 3  # Asking takes the median of the last five times, of three at least.
_GAIN = 0.2  # A source is believed to bring this many tokens a step at first.
_MEMORY = 64  # What it brings comes in few steps, so that the mean follows this many.
_PAUSE = 256  # A source that does not pay is believed anew after this many steps.


class SourceWorth:
    """What a source brings and takes with one model. A price tells the tokens that seconds cost."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMED)
        self._tokens = _GAIN
        self._num_paused = 0

    def observe(self, *, seconds: float, tokens: float | None = None) -> None:
        """Takes in what it took when it was asked, and what it brought where that is counted."""
        self._seconds.append(seconds)
        if tokens is not None:
            self._tokens += (tokens - self._tokens) / _MEMORY

    def pays(self, tokens: float, price: Callable[[float], float]) -> bool:
        """Is it worth asking for some tokens? It is until it was timed: first times may be slow."""
        is_known = len(self._seconds) >= _NUM_FIRST
        return tokens >= price(median(self._seconds) if is_known else 0.0)

    def should_ask(self, price: Callable[[float], float]) -> bool:
        """Are rows to ask it in the next step? To be called once for each step."""
        if self._num_paused > 0:
            self._num_paused -= 1
        elif self.pays(self._tokens, price):
            return True
        else:
            self._tokens, self._num_paused = _GAIN, _PAUSE - 1
        return False
