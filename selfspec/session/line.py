"""The prompts that wait, which of them starts next, and how much is read between two steps.

All of it knows lengths in tokens, and nothing of models.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from selfspec.forward.sizes import Limits
    from selfspec.prompt import Prompt


# A forward over fewer tokens takes hardly less time, since it reads all weights too.
_FEWEST, _MOST = 64, 512


class Scheduler(Protocol):
    """Says in which order prompts start."""

    def turn(self, num_tokens: int) -> float:
        """The prompt with the least turn starts next; of equal ones, the one that came first.

        `num_tokens` are those of the prompt, of its longest answer and of the widest draft.
        """
        ...


class ArrivalOrder:
    """The prompt that came first: none overtakes another."""

    def turn(self, num_tokens: int) -> float:
        return 0


class ShortestFirst:
    """The shortest prompt, so that rows of similar lengths run together.

    So more of them fit than in order of arrival. While shorter prompts arrive, a long one waits.
    """

    def turn(self, num_tokens: int) -> float:
        return num_tokens


class Waiting:
    """Prompts that wait, in the order of their turns."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._line: list[tuple[float, Prompt]] = []  # Sorted by turn.

    def __len__(self) -> int:
        return len(self._line)

    @property
    def first(self) -> Prompt | None:
        return self._line[0][1] if self._line else None

    def add(self, prompt: Prompt) -> None:
        turn = self._scheduler.turn(prompt.max_columns)
        insort(self._line, (turn, prompt), key=itemgetter(0))  # After those of the same turn.

    def start_next(self, running: Sequence[int], limits: Limits) -> Prompt | None:
        """Starts the first prompt, if it fits beside rows that may come to need these columns.

        One that can't share forwards does not.
        """
        prompt = self.first
        if prompt is None or prompt.route.alone_reason is not None:
            return None
        if not limits.fits([*running, prompt.max_columns]):
            return None
        self.leave(prompt.index)
        return prompt

    def leave(self, index: int) -> None:
        self._line = [(turn, prompt) for turn, prompt in self._line if prompt.index != index]


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
