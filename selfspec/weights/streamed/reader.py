"""A thread that fills buffers with items, in a fixed order and again and again, before their use.

Knows the numbers of items and of buffers; `Buffers` does the filling.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

from selfspec.errors import WeightsError
from selfspec.weights.streamed.layer_weights import Buffers

_THREAD = "selfspec-reader"
_PATIENCE = 10.0  # Seconds to wait for the end of the thread, at most.


class _Job(NamedTuple):
    item: int
    buffer: int
    filled: Future[None]


class Reader:
    """Serves one user at a time, who takes items in order and gives one back before the next.

    After a forward that broke off, the user may take another item than the next one. Once the
    thread has finished the item that it is reading, it goes on from the one that was taken. Which
    buffers are free follows from the jobs, so that no interrupt loses a buffer.
    """

    def __init__(self, buffers: Buffers, num_items: int) -> None:
        self.buffers = buffers
        self._num_items = num_items
        self._process = os.getpid()
        # Python may collect a model at any moment, even while another thread pool holds the lock
        # that all pools share. A thread pool of ours would then wait for that lock without end.
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._work,), name=_THREAD, daemon=True
        )
        self._thread.start()
        self._is_closed = False
        self._jobs: deque[_Job] = deque()  # in the order of their use
        self._buffer_in_use: int | None = None
        self.seconds_waited = 0.0
        self.seconds_read = 0.0
        self._fill_free(0)

    def take(self, item: int) -> int:
        """Waits until an item is read; returns the buffer that holds it.

        Raises what went wrong in the thread. After that, the item can be taken again.
        """
        start = perf_counter()
        self.give_back()
        if not self._jobs or self._jobs[0].item != item:
            self._forget()
            self._fill_free(item)
        self._wait_for_first()
        self._buffer_in_use = self._jobs[0].buffer
        self._jobs.popleft()
        self.seconds_waited += perf_counter() - start
        return self._buffer_in_use

    def give_back(self) -> None:
        """The buffer that was taken last may be filled again."""
        if self._buffer_in_use is not None:
            self._buffer_in_use = None
            if self._jobs:
                self._fill_free((self._jobs[-1].item + 1) % self._num_items)

    def close(self) -> None:
        """Ends the thread after the item that it is reading, and waits some seconds for that."""
        for job in self._jobs:
            job.filled.cancel()
        if self._is_closed:
            return
        self._is_closed = True
        self._work.put(self.buffers.close)
        self._work.put(None)
        # Python may collect a model in any thread, and this one can't wait for itself.
        if threading.current_thread().name != _THREAD:
            self._thread.join(_PATIENCE)

    def _forget(self) -> None:
        for job in self._jobs:
            job.filled.cancel()
        self._jobs.clear()

    def _fill_free(self, item: int) -> None:
        """Fills all free buffers, from an item on; none once the reader is closed."""
        if self._is_closed:
            return
        used = {job.buffer for job in self._jobs} | {self._buffer_in_use}
        for buffer in range(len(self.buffers)):
            if buffer not in used:
                job = _Job(item, buffer, Future())
                self._jobs.append(job)
                self._work.put(partial(self._fill, job))
                item = (item + 1) % self._num_items

    def _fill(self, job: _Job) -> None:
        if not job.filled.set_running_or_notify_cancel():
            return
        start = perf_counter()
        try:
            self.buffers.fill(job.item, job.buffer)
        except BaseException as error:
            job.filled.set_exception(error)
        else:
            job.filled.set_result(None)
        self.seconds_read += perf_counter() - start

    def _wait_for_first(self) -> None:
        try:
            if not self._jobs or self._process != os.getpid():
                raise CancelledError
            error = self._jobs[0].filled.exception()
        except CancelledError:
            raise WeightsError(
                "the thread that reads weights must run (it has ended, as it does in a process "
                "that was forked); load the model again"
            ) from None
        if error is not None:
            self._forget()
            raise WeightsError(f"weights can't be read: {error}") from error


def _serve(work: SimpleQueue[Callable[[], object] | None]) -> None:
    """Runs in the thread: does the work in the queue until a None comes."""
    while (do := work.get()) is not None:
        do()
        del do  # While the thread waits, it must not keep the reader alive.
