"""Two units that work side by side: threads pinned to cores of their own.

Torch releases Python's lock inside its operators, so two threads of one process really do work at
the same time. Each computes with one thread of torch's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval.errors import EvalError
from eval.methods.names import rotated

Task = Callable[[], Any]
_WARM_UP = 2  # Rounds that don't count.


class Unit:
    """A thread that does one task after the other on its core."""

    def __init__(self, core: int) -> None:
        self._core = core
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def start(self, task: Task) -> None:
        """Hands over a task; `result` waits for it."""
        self._tasks.put(task)

    def result(self) -> Any:
        """What the task gave, or the exception that it raised."""
        return self._results.get()

    def stop(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        os.sched_setaffinity(0, {self._core})  # Linux takes 0 for the calling thread.
        torch.set_num_threads(1)
        with torch.inference_mode():
            while (task := self._tasks.get()) is not None:
                try:
                    self._results.put(task())
                except Exception as error:
                    self._results.put(error)


class Pair(NamedTuple):
    """The two units of a machine."""

    first: Unit
    second: Unit

    def run(self, first: Task | None, second: Task | None) -> list[Any]:
        """What both tasks gave, done at the same time; nothing for a unit that has none.

        Raises what a task raised, when both are done.
        """
        busy = [(unit, task) for unit, task in zip(self, (first, second), strict=True) if task]
        for unit, task in busy:
            unit.start(task)
        results = [unit.result() for unit, _ in busy]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def seconds_together(self, first: Task, second: Task, rounds: int) -> tuple[float, float]:
        """The mean time of each unit's task while the other unit repeats its own.

        A core that is shared with another process gets turns of some milliseconds, so a short task
        takes either no turn of others or a whole one, and only the mean tells its speed.
        """
        times: tuple[list[float], list[float]] = ([], [])
        is_over = threading.Event()

        def repeated(index: int, task: Task) -> None:
            try:
                while not is_over.is_set() and min(map(len, times)) < rounds:
                    start = perf_counter()
                    task()
                    times[index].append(perf_counter() - start)
            finally:  # If this task failed, the other unit must not wait for its times.
                is_over.set()

        self.run(lambda: repeated(0, first), lambda: repeated(1, second))
        return mean(times[0]), mean(times[1])


def seconds_of(
    ways: Mapping[str, Callable[[Any], object]], inputs: Sequence[Any], rounds: int
) -> dict[str, float]:
    """The median time of each way; which one begins changes from round to round, as the input."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_WARM_UP + rounds):
        for name in rotated(list(ways), turn):
            start = perf_counter()
            ways[name](inputs[turn % len(inputs)])
            if turn >= _WARM_UP:
                times[name].append(perf_counter() - start)
    return {name: median(spent) for name, spent in times.items()}


def two_cores() -> tuple[int, int]:
    """The cores of both units."""
    if not hasattr(os, "sched_setaffinity"):
        raise EvalError("two units need a system that pins threads to cores (Linux does)")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise EvalError(f"two units need at least 2 cores (got {len(cores)})")
    return cores[0], cores[1]


@contextmanager
def two_units() -> Iterator[Pair]:
    """Two CPU cores."""
    pair = Pair(*map(Unit, two_cores()))
    with ExitStack() as stack:
        for unit in pair:
            stack.callback(unit.stop)
        yield pair


@contextmanager
def busy_core(core: int, number: int) -> Iterator[None]:
    """So many processes that do nothing but keep one core busy."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    loads = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()
