"""Whether a source that takes seconds of its own brings as much as they cost."""

from __future__ import annotations

from collections.abc import Callable

from selfspec.cost.ledger import MeanRatio

__all__ = ["SourceWorth"]

_TRIED = 12  # Steps in which it is asked before anything is decided.
_PAUSE = 64  # Steps in which it is not asked, once it does not pay; twice as many the next time.
_LONGEST = 1024
_FADE = 0.99  # What a source brings comes in few steps, so that many have to be looked at.
_GAIN = 0.2  # The tokens a step that it is believed to bring at first,
_WEIGHT = 32.0  # as after this many steps.


class SourceWorth:
    """What a source has brought and cost with one model, over all calls.

    >>> worth = SourceWorth()
    >>> for _ in range(12):
    ...     assert worth.should_ask(lambda seconds: seconds / 0.1)
    ...     worth.observe(seconds=0.001, tokens=0.1)
    >>> sum(worth.should_ask(lambda seconds: seconds / 0.001) for _ in range(64))
    0
    """

    def __init__(self) -> None:
        self._seconds = MeanRatio(0.0, weight=1e-9, fade=_FADE)
        self._tokens = MeanRatio(_GAIN, weight=_WEIGHT, fade=_FADE)
        self._num_tried = self._num_paused = 0
        self._was_asked = False  # By any row, since the last step began.
        self._pause = _PAUSE

    def observe(self, *, seconds: float, tokens: float) -> None:
        """Takes in what it took and brought in a step in which a row asked it."""
        self._seconds.observe(seconds, 1)
        self._tokens.observe(tokens, 1)
        self._was_asked = True

    def should_ask(self, price: Callable[[float], float]) -> bool:
        """Are rows to ask it in the next step? `price` are the tokens that some seconds cost.

        To be called once for each step, whatever the number of rows. If it does not pay, it is
        tried again some steps later.
        """
        self._num_tried += self._was_asked
        self._was_asked = False
        if self._num_paused > 0:
            self._num_paused -= 1
        elif self._num_tried >= _TRIED and self._tokens.value < price(self._seconds.value):
            self._num_tried, self._num_paused = 0, self._pause - 1
            self._pause = min(2 * self._pause, _LONGEST)
        else:
            return True
        return False
