"""Which job is handed out next. One that a worker took along when it ended comes back.

A job that two workers did not survive is handed out by itself, so that the next worker's end shows
whether it is to blame. Then it is given up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

_SUSPECT = 2  # If this many workers ended with a job, it is handed out alone.

J = TypeVar("J")


class Lost(NamedTuple):
    """In the place of a result: `num_workers` ended with this job, and nobody has done it."""

    num_workers: int


class Jobs(Generic[J]):
    """Numbered jobs, of which each is handed out until somebody has done it.

    `ahead` is how far the numbers of jobs that are handed out may lie apart; None: any distance.
    """

    def __init__(self, jobs: Iterable[tuple[int, J]], ahead: int | None = None) -> None:
        self._fresh = iter(jobs)
        self._ahead = ahead
        self._open: dict[int, J] = {}  # Handed out or come back, in the order of their numbers.
        self._again: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._losses: Counter[int] = Counter()
        self._last = 0

    @property
    def num_open(self) -> int:
        """How many jobs were taken and are not done."""
        return len(self._open)

    def take(self, held: Mapping[int, J], most: int) -> dict[int, J]:
        """More jobs for a worker that has some, up to `most` in all."""
        if self._suspects and not held:
            number = self._suspects.popleft()
            return {number: self._open[number]}
        taken: dict[int, J] = {}
        if any(self._losses[number] >= _SUSPECT for number in held):
            return taken
        while len(held) + len(taken) < most and (fresh := self._next()) is not None:
            taken[fresh] = self._open[fresh]
        return taken

    def done(self, number: int) -> None:
        """There is a result, or there will never be one."""
        del self._open[number]

    def put_back(self, held: Iterable[int]) -> list[tuple[int, Lost]]:
        """Takes back the jobs of a worker that has ended; returns those that are given up."""
        given_up = []
        for number in held:
            self._losses[number] += 1
            if self._losses[number] > _SUSPECT:
                self.done(number)
                given_up.append((number, Lost(self._losses[number])))
            elif self._losses[number] == _SUSPECT:
                self._suspects.append(number)
            else:
                self._again.append(number)
        return given_up

    def _next(self) -> int | None:
        if self._again:
            return self._again.popleft()
        if self._ahead and self._open and self._last + 1 - next(iter(self._open)) >= self._ahead:
            return None
        for number, job in self._fresh:
            self._open[number] = job
            self._last = number
            return number
        return None
