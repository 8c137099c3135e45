"""How many tokens of a prompt are read between two steps of the rows that are being written."""

from __future__ import annotations

# A part has 64 to 512 tokens. A forward over fewer takes hardly less time, since it reads all
# weights too.
_FEWEST, _MOST = 64, 512
_AT_FIRST = 64  # The tokens of a part while no step or no part was timed.
_STEPS = 2.0  # A part may take as long as two steps.
_WEIGHT = 0.25  # The latest time counts a quarter, all earlier ones the rest.


class ReadingPace:
    """Parts of prompts that take about as long as two steps, so that no answer waits for long.

    >>> pace = ReadingPace()
    >>> pace.num_tokens(num_rows=0), pace.num_tokens(num_rows=3)
    (512, 64)
    >>> pace.observe_step(0.1)
    >>> pace.observe_part(100, 0.1)
    >>> pace.num_tokens(num_rows=3)
    200
    """

    def __init__(self) -> None:
        self._step: float | None = None  # Seconds.
        self._token: float | None = None  # Seconds to read one.

    def num_tokens(self, num_rows: int) -> int:
        """How many tokens may be read before the next step of the rows."""
        if not num_rows:
            return _MOST
        if self._step is None or self._token is None:
            return _AT_FIRST
        return int(min(max(_STEPS * self._step / self._token, _FEWEST), _MOST))

    def observe_step(self, seconds: float) -> None:
        self._step = _mixed(self._step, seconds)

    def observe_part(self, num_tokens: int, seconds: float) -> None:
        """Learns what reading a part takes, if it has 64 tokens: shorter ones are too noisy."""
        if num_tokens >= _FEWEST:
            self._token = _mixed(self._token, max(seconds, 1e-9) / num_tokens)


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT) * before + _WEIGHT * now
