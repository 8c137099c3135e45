"""What runs in the process of a worker: it opens once, works on jobs, and closes.

What the library logs there goes along with the results, since nobody reads a worker's own output.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, NamedTuple

# Gets more jobs with their numbers, and returns the results that are there, also of earlier jobs.
# It returns none only if there is no job left.
Work = Callable[[list[tuple[int, Any]]], list[tuple[int, Any]]]

_LOGGER = logging.getLogger("selfspec")


class Reply(NamedTuple):
    """What a call to a worker gives back."""

    results: list[tuple[int, Any]]
    records: list[logging.LogRecord]


class Worker:
    """Does jobs in a process of its own, in which `opened` makes what does them.

    `folder` is where the command runs, so that names of files mean the same here.
    """

    def __init__(
        self, opened: Callable[[], AbstractContextManager[Work]], folder: str, level: int
    ) -> None:
        self._opened = opened
        self._stack = ExitStack()
        self._work: Work | None = None
        self._records: SimpleQueue[logging.LogRecord] = SimpleQueue()
        _LOGGER.addHandler(QueueHandler(self._records))
        _LOGGER.setLevel(level)
        with suppress(OSError):  # Another machine need not have this folder.
            os.chdir(folder)

    def open(self) -> Reply:
        """Loads what is needed."""
        self._work = self._stack.enter_context(self._opened())
        return self._reply([])

    def work(self, jobs: list[tuple[int, Any]]) -> Reply:
        """Takes jobs; returns when some of all those that it has are done."""
        assert self._work is not None
        return self._reply(self._work(jobs))

    def close(self) -> Reply:
        """Keeps what is to be kept."""
        self._stack.close()
        return self._reply([])

    def _reply(self, results: list[tuple[int, Any]]) -> Reply:
        return Reply(results, [self._records.get() for _ in range(self._records.qsize())])
