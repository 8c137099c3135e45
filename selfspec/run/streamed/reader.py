"""A thread that fills buffers with items in a fixed order, round and round, ahead of their use.

Knows numbers of items and of buffers; what filling one means is up to others.
"""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import NamedTuple, Protocol

from selfspec.errors import WeightsError

__all__ = ["Buffers", "Reader"]

# A forward that waits for a buffer looks so often, in seconds, whether the thread still lives.
_LOOK = 0.5
# So many seconds the end of the thread is waited for.
_PATIENCE = 10.0


class Buffers(Protocol):
    """The buffers, as the reader works with them."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def fill(self, item: int, buffer: int) -> None:
        """Reads an item into a buffer. Called by the reader's thread alone."""
        ...

    def taken(self, buffer: int) -> None:
        """Called by the user of a buffer, before it uses what is in it."""
        ...

    def given_back(self, buffer: int) -> None:
        """Called by the user of a buffer, after which it is filled again."""
        ...

    def close(self) -> None:
        """Called last, by the reader's thread."""
        ...


class _Filled(NamedTuple):
    item: int
    buffer: int


class Reader:
    """Serves one user at a time, who takes the items in order and gives each back before the next.

    If the user takes another item than the next one, as after a forward that broke off, the reader
    goes on from there. Which buffers are free follows from the state, so that an interrupt at any
    moment loses none.
    """

    def __init__(self, buffers: Buffers, num_items: int) -> None:
        self._buffers = buffers
        self._num_items = num_items
        self._change = threading.Condition()
        self._ready: deque[_Filled] = deque()
        self._filling: _Filled | None = None
        self._is_wanted = True  # whether what is being filled is the next in order
        self._held: int | None = None
        self._next = 0  # the item to fill next
        self._error: Exception | None = None
        self._told = False  # whether a forward has raised the error
        self._closed = False
        self.seconds_waited = 0.0
        self.seconds_read = 0.0
        self._thread = threading.Thread(target=self._run, name="selfspec-reader", daemon=True)
        self._thread.start()

    def take(self, item: int) -> int:
        """The buffer that holds an item; waits until it is filled.

        Raises what went wrong in the thread, after which the item can be asked for again.
        """
        start = perf_counter()
        with self._change:
            self._give_back()
            if self._told or item != self._due():
                self._restart(item)
            while not self._ready:
                self._check()
                self._change.wait(_LOOK)
            self._held = self._ready[0].buffer
            self._ready.popleft()
            buffer = self._held
        self._buffers.taken(buffer)
        self.seconds_waited += perf_counter() - start
        return buffer

    def give_back(self) -> None:
        """The buffer that was taken last may be filled again."""
        with self._change:
            self._give_back()

    def close(self) -> None:
        """Ends the thread after the item that it is reading, and waits some seconds for that.

        A thread that still runs when Python shuts down could crash the process.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)

    def _give_back(self) -> None:
        if self._held is not None:
            self._buffers.given_back(self._held)
            self._held = None
            self._change.notify_all()

    def _due(self) -> int:
        """The item that comes next."""
        if self._ready:
            return self._ready[0].item
        return self._filling.item if self._filling and self._is_wanted else self._next

    def _restart(self, item: int) -> None:
        self._ready.clear()
        self._is_wanted = False
        self._next = item
        self._error = None
        self._told = False
        self._change.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            self._told = True
            raise WeightsError(f"weights can't be read: {self._error}") from self._error
        if self._closed or not self._thread.is_alive():
            raise WeightsError(
                "the thread that reads weights must run (it has ended, as it does in a process "
                "that was forked); load the model again"
            )

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                self._fill(job)
        finally:
            self._buffers.close()

    def _next_job(self) -> _Filled | None:
        """Waits for a free buffer; None when the reader was closed."""
        with self._change:
            while not self._closed:
                used = {each.buffer for each in self._ready} | {self._held}
                free = [buffer for buffer in range(len(self._buffers)) if buffer not in used]
                if free and self._error is None:
                    self._filling = _Filled(self._next, free[0])
                    self._is_wanted = True
                    self._next = (self._next + 1) % self._num_items
                    return self._filling
                self._change.wait()
            return None

    def _fill(self, job: _Filled) -> None:
        start, error = perf_counter(), None
        try:
            self._buffers.fill(job.item, job.buffer)
        except Exception as found:
            error = found
        with self._change:
            if self._is_wanted:
                if error is None:
                    self._ready.append(job)
                else:
                    self._error, self._next = error, job.item
            self._filling = None
            self.seconds_read += perf_counter() - start
            self._change.notify_all()
