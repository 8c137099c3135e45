"""The reader's thread: items in order, whoever breaks off, whatever goes wrong."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from concurrent.futures.thread import _global_shutdown_lock

import pytest

from selfspec import WeightsError
from selfspec.weights.streamed.reader import Reader
from tests.waiting import wait_until


class Shelf:
    """Buffers of plain numbers; notes what is filled, and when a buffer in use is overwritten."""

    def __init__(self, number: int = 2) -> None:
        self.held = [-1] * number
        self.filled: list[int] = []
        self.num_waiting = 0
        self.failing: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.closed = threading.Event()

    def __len__(self) -> int:
        return len(self.held)

    def fill(self, item: int, buffer: int) -> None:
        self.num_waiting += 1
        self.gate.wait(10)
        self.num_waiting -= 1
        if self.failing is not None:
            raise self.failing
        self.held[buffer] = item
        self.filled.append(item)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def reader(shelf):
    reader = Reader(shelf, 5)
    yield reader
    shelf.gate.set()
    reader.close()
    assert shelf.closed.is_set()


def use(reader, shelf, item):
    buffer = reader.take(item)
    assert shelf.held[buffer] == item
    return buffer


def use_all(reader, shelf, first=0):
    for item in range(first, 5):
        use(reader, shelf, item)


def test_what_is_held_is_not_overwritten(reader, shelf):
    buffer = use(reader, shelf, 0)
    wait_until(lambda: all(job.filled.done() for job in reader._jobs))
    assert reader._work.empty()  # Nothing is read until the buffer is given back.
    assert shelf.held[buffer] == 0
    assert shelf.filled == [0, 1]


def test_any_order_is_served(reader, shelf):
    """As after forwards that ended early, of which some gave their buffer back."""
    chance = random.Random(0)
    for _ in range(300):
        use(reader, shelf, chance.randrange(5))
        if chance.random() < 0.7:
            reader.give_back()


@pytest.mark.parametrize("item", [0, 3])
def test_an_error_is_raised_where_weights_are_needed(reader, shelf, item):
    wait_until(lambda: len(shelf.filled) == 2)
    shelf.failing = OSError("the disk is gone")
    for _ in range(2):
        with pytest.raises(WeightsError, match="weights can't be read: the disk is gone"):
            use_all(reader, shelf, item)
    shelf.failing = None
    use_all(reader, shelf)


def test_an_error_ahead_of_its_use_waits(reader, shelf):
    wait_until(lambda: len(shelf.filled) == 2)
    shelf.failing = OSError("the disk is gone")
    use(reader, shelf, 0)
    use(reader, shelf, 1)
    shelf.failing = None
    use(reader, shelf, 0)


def test_another_process_has_no_thread(reader, shelf, monkeypatch):
    use(reader, shelf, 0)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(WeightsError, match="the thread that reads weights must run"):
        use(reader, shelf, 1)


def test_an_interrupt_while_waiting(shelf, reader, monkeypatch):
    wait_until(lambda: len(shelf.filled) == 2)

    def interrupted(_future: Future[None], _seconds: float | None = None) -> None:
        raise KeyboardInterrupt

    shelf.gate.clear()
    monkeypatch.setattr(Future, "exception", interrupted)
    with pytest.raises(KeyboardInterrupt):
        use(reader, shelf, 3)
    monkeypatch.undo()
    shelf.gate.set()
    use_all(reader, shelf)


def test_a_closed_reader_serves_nothing(shelf):
    reader = Reader(shelf, 5)
    wait_until(lambda: len(shelf.filled) == 2)
    reader.close()
    assert shelf.closed.is_set()
    use(reader, shelf, 0)
    use(reader, shelf, 1)
    with pytest.raises(WeightsError, match="it has ended"):
        use(reader, shelf, 2)


def test_a_model_may_be_collected_while_a_thread_pool_of_others_holds_its_lock(shelf):
    """As when transformers loads the next one, and Python collects garbage in the midst of it."""
    closing = threading.Thread(target=Reader(shelf, 5).close)
    with _global_shutdown_lock:
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    assert shelf.closed.is_set()
