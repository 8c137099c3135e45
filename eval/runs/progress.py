"""A line for each question as it is done, and below them how far the run is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from eval.methods.names import STOCK
from eval.report.rows import Answer
from eval.report.speed_up import Cost, costs, ratios

_SILENCE = 10.0  # seconds


class RunProgress:
    """On a terminal with a bar, elsewhere lines alone."""

    def __init__(self, file: TextIO) -> None:
        self._last = monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(file=file, highlight=False),
            disable=not file.isatty(),
            transient=True,
        )

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def meanwhile(self, text: str) -> None:
        """A line where there was none for a while, so that no wait is silent."""
        if monotonic() - self._last >= _SILENCE:
            self.say(text)

    def say(self, text: str) -> None:
        self._last = monotonic()
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def stage(self, title: str, total: int) -> Callable[[str], None]:
        """A part of the run, with a bar of its own; returns what says that one more is done."""
        task, start, numbers = self._progress.add_task(title, total=total), monotonic(), count(1)

        def step(text: str) -> None:
            number = next(numbers)
            left = clock((monotonic() - start) / number * (total - number))
            self.say(f"[{number}/{total}] {text}  (left {left})")
            self._progress.advance(task)

        return step


def clock(seconds: float) -> str:
    """As people read it.

    >>> clock(7), clock(754), clock(8000)
    ('0:07', '12:34', '2:13:20')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def answer_line(lines: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> str:
    """What a question's answers were like: milliseconds a token, and how much sooner than stock."""
    answers = [Answer.from_line(line) for line in lines if line["kind"] == "answer"]
    names = {each.method for each in answers}
    cells = [_cell(name, answers) for name in methods if name in names]
    ids = ",".join(map(str, answers[0].questions))
    num_tokens = max((cost.tokens for cost in _costs(answers).values()), default=0)
    return f"{answers[0].task} {ids}, {num_tokens} tokens: {', '.join(cells)}"


def _costs(answers: Sequence[Answer]) -> dict[str, Cost]:
    """By method, what the question took; without those who failed."""
    by_method = {each.method: costs(answers, each.method) for each in answers}
    return {name: cost for name, found in by_method.items() for cost in found.values()}


def _cell(name: str, answers: Sequence[Answer]) -> str:
    cost = _costs(answers).get(name)
    if cost is None:
        errors = (each.error for each in answers if each.method == name and each.error)
        return f"{name} FAILED ({next(errors)})"
    told = f"{name} {1000 * cost.seconds / max(cost.tokens, 1):.2f} ms"
    speed_up = ratios(costs(answers, STOCK), costs(answers, name))
    if speed_up is None or name == STOCK:
        return told
    return f"{told} {speed_up.total:.2f}x{_verdict(name, answers)}"


def _verdict(name: str, answers: Sequence[Answer]) -> str:
    """What is not identical is said, with its index."""
    for answer in answers:
        numbers = answer.numbers
        if answer.method == name and numbers and numbers.same in ("near-tie", "different"):
            return f" ({numbers.same} at token {numbers.differs_at})"
    return ""
