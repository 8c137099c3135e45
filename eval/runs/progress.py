"""A line for each question as it is done, with the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import Any, TextIO

from eval.methods.names import STOCK
from eval.runs.processor import LEAST_SHARE

_SILENCE = 10.0  # seconds


class RunProgress:
    """Lines that say what is done, and never silence for long."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._last = file, monotonic()

    def meanwhile(self, text: str) -> None:
        """A line where there was none for a while, so that no wait is silent."""
        if monotonic() - self._last >= _SILENCE:
            self.say(text)

    def say(self, text: str) -> None:
        self._last = monotonic()
        print(text, file=self._file, flush=True)

    def stage(self, total: int) -> Callable[[str], None]:
        """A part of the run; returns what says that one more is done, and how long is left."""
        start, numbers = monotonic(), count(1)

        def step(text: str) -> None:
            number = next(numbers)
            left = clock((monotonic() - start) / number * (total - number))
            self.say(f"[{number}/{total}] {text}  (left {left})")

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
    """What a question's answers took for each token, and how much sooner than stock's."""
    answers = [line for line in lines if line["kind"] == "answer"]
    by_method = {name: [a for a in answers if a["method"] == name] for name in methods}
    per_token = {name: _ms_per_token(given) for name, given in by_method.items() if given}
    shares = (answer["numbers"].get("processor_share") for answer in answers if "numbers" in answer)
    if any(share is not None and share < LEAST_SHARE for share in shares):
        per_token = {name: ms for name, ms in per_token.items() if ms is None}  # Those that failed.
    cells = [
        _cell(name, by_method[name], ms, per_token.get(STOCK)) for name, ms in per_token.items()
    ] or ["the machine was busy"]
    num_tokens = max(map(_num_tokens, by_method.values()))
    return f"{answers[0]['task']} {answers[0]['question']}, {num_tokens} tokens: {', '.join(cells)}"


def _num_tokens(given: Sequence[Mapping[str, Any]]) -> int:
    return sum(answer["numbers"]["num_new_tokens"] for answer in given if "numbers" in answer)


def _ms_per_token(given: Sequence[Mapping[str, Any]]) -> float | None:
    """None where a turn failed."""
    if any("error" in answer for answer in given):
        return None
    seconds = sum(answer["numbers"]["seconds"] for answer in given)
    return 1000 * seconds / max(_num_tokens(given), 1)


def _cell(
    name: str, given: Sequence[Mapping[str, Any]], ms: float | None, stock: float | None
) -> str:
    """What is not identical is said, with its index."""
    if ms is None:
        return f"{name} FAILED ({next(answer['error'] for answer in given if 'error' in answer)})"
    told = f"{name} {ms:.2f} ms a token"
    if stock is None or name == STOCK:
        return told
    parted = [
        answer["numbers"] for answer in given if answer["numbers"].get("differs_at") is not None
    ]
    where = (f" ({each['same']} at token {each['differs_at']})" for each in parted)
    return f"{told} {stock / ms:.2f}x{next(where, '')}"
