"""Prompts that are to run together, and what batches of them ask of a machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eval.edge.latency import Array, Latency
from eval.errors import EvalError

__all__ = ["LENGTHS", "Setting", "Sorted", "Task", "tokens_per_step"]

LENGTHS = tuple(range(11))  # The draft lengths that are tried.


class Task(NamedTuple):
    """One prompt: its tokens, and the tokens that its answer is expected to have."""

    input_length: int
    output_length: int


@dataclass(frozen=True)
class Setting:
    """What a plan is made for.

    `acceptance` is the chance that a drafted token is accepted if those before it were.
    `max_tokens` is the memory of a batch: rows times the tokens of its longest row.
    """

    latency: Latency
    acceptance: float
    max_rows: int
    max_tokens: float = math.inf
    lengths: Sequence[int] = LENGTHS

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1:
            raise EvalError(f"acceptance must be >= 0 and < 1 (got {self.acceptance})")
        if self.max_rows < 1:
            raise EvalError(f"max_rows must be >= 1 (got {self.max_rows})")
        if not self.lengths or min(self.lengths) < 0:
            raise EvalError(f"lengths must be draft lengths >= 0 (got {self.lengths})")


def tokens_per_step(length: float | Array, acceptance: float) -> Array:
    """The tokens that a step commits, if each drafted one is accepted with the same chance.

    >>> [round(float(tokens_per_step(length, 0.5)), 3) for length in (0, 1, 2)]
    [1.0, 1.5, 1.75]
    """
    return np.asarray((1 - acceptance ** (np.asarray(length) + 1.0)) / (1 - acceptance))


class Sorted:
    """The sorted prompts as arrays, and what batches of them ask for."""

    def __init__(self, tasks: Sequence[Task], setting: Setting) -> None:
        self.setting = setting
        self.inputs = np.array([task.input_length for task in tasks], dtype=np.float64)
        self.outputs = np.array([task.output_length for task in tasks], dtype=np.float64)
        longest = float((self.inputs + self.outputs).max(initial=0))
        if longest > setting.max_tokens:
            raise EvalError(
                "max_tokens must be >= the tokens of the longest prompt and its answer, "
                f"{longest:g} (got {setting.max_tokens:g})"
            )

    def starts(self, end: int) -> range:
        """The starts of the batches that fit and end before `end`, largest batch last.

        A start before one that does not fit does not fit either.
        """
        input_length = output_length = 0.0
        for start in range(end - 1, max(end - self.setting.max_rows, 0) - 1, -1):
            input_length = max(input_length, self.inputs[start])
            output_length = max(output_length, self.outputs[start])
            if (end - start) * (input_length + output_length) > self.setting.max_tokens:
                return range(end - 1, start, -1)
        return range(end - 1, max(end - self.setting.max_rows, 0) - 1, -1)

    def seconds(self, end: int) -> Array:
        """The seconds of each batch of `starts(end)`, a row for each draft length.

        Rows that are done drop out. T is linear in rows and in context, so the steps of a batch
        cost what as many steps with the mean rows and the mean context cost.
        """
        starts = np.array(self.starts(end))
        last = slice(starts[-1], end)
        inputs = np.maximum.accumulate(self.inputs[last][::-1])
        outputs = np.maximum.accumulate(self.outputs[last][::-1])
        rows = np.cumsum(self.outputs[last][::-1]) / outputs
        latency, lengths = self.setting.latency, np.array(self.setting.lengths)[:, None]
        num_steps = outputs / tokens_per_step(lengths, self.setting.acceptance)
        context = inputs + outputs / 2
        step = latency.draft_s(rows, lengths, context) + latency.verify_s(rows, lengths, context)
        return np.asarray(num_steps * step + self._reading(last, inputs))

    def _reading(self, last: slice, inputs: Array) -> Array:
        latency = self.setting.latency
        rows = np.arange(1.0, len(inputs) + 1)
        return latency.reading_s(rows, inputs) + latency.draft_reading_s(rows, inputs)

    def num_steps(self, length: int) -> Array:
        """The steps of each prompt."""
        return np.ceil(self.outputs / tokens_per_step(length, self.setting.acceptance))

    def stages(self, batch: range, length: int, num_steps: Array) -> tuple[Array, Array]:
        """The seconds of a batch's draft and of its verification, for each step of the plan.

        The first step also reads the prompts. A batch that is done takes no time.
        """
        own = slice(batch.start, batch.stop)
        latency, steps = self.setting.latency, np.arange(num_steps.max())
        rows = (num_steps[own, None] > steps).sum(axis=0).astype(np.float64)
        input_length = self.inputs[own].max()
        context = input_length + steps * tokens_per_step(length, self.setting.acceptance)
        runs = rows > 0
        draft = np.where(runs, latency.draft_s(rows, length, context), 0.0)
        verify = np.where(runs, latency.verify_s(rows, length, context), 0.0)
        draft[0] += latency.draft_reading_s(len(batch), input_length)
        verify[0] += latency.reading_s(len(batch), input_length)
        return draft, verify
