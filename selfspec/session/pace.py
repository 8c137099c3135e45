"""How many tokens of a prompt are read between two steps of the rows that are being written."""

from __future__ import annotations

import sys

# A forward over fewer tokens takes hardly less time, since it reads all weights too.
_FEWEST, _MOST = 64, 512


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
        if not num_rows:
            return _MOST
        if self._step is None or self._token is None:
            return _FEWEST
        return int(min(max(2 * self._step / self._token, _FEWEST), _MOST))

    def observe_step(self, seconds: float) -> None:
        self._step = _mixed(self._step, seconds)

    def observe_part(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= _FEWEST:  # Shorter parts are too noisy.
            self._token = _mixed(self._token, max(seconds, 1e-9) / num_tokens)


class WholePrompts(ReadingPace):
    """Each prompt is read at once."""

    def num_tokens(self, num_rows: int) -> int:
        return sys.maxsize


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else 0.75 * before + 0.25 * now
