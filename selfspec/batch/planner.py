"""Chooses which waiting prompts are admitted to a batch whose rows come and go.

A planner is asked whenever a row may be free, and learns from the steps in between. It sees lengths
and seconds, and nothing else of prompts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sortedcontainers import SortedKeyList

from selfspec.batch.latency import Latency
from selfspec.batch.program import Objective, in_turns
from selfspec.batch.work import Setting, Task
from selfspec.cost.pacing import MeanRatio
from selfspec.errors import ConfigError

__all__ = ["BatchStep", "Planner"]

# A plan looks at so many prompts at a time, and lasts until the first one waiting is not in it.
_WINDOW = 64
# What is taken for the chance that a draft is accepted, as if so many drafts had been tried.
_ACCEPTANCE, _TRIED = 0.5, 32
_MOST_ACCEPTED = 0.99
_RUNS = -1  # The number of a prompt that waits no more.


class BatchStep(NamedTuple):
    """What a step of a batch took, and what it brought."""

    rows: int
    width: int  # Of each row's forward: the last token and the drafted ones.
    context: int  # Of the longest row.
    draft_seconds: float  # All but the forward.
    verify_seconds: float
    num_tokens: int  # Committed, by all rows.


class Planner:
    """Admits prompts in the order and in the numbers of the best plan for those that wait.

    The shortest come first, and the plan splits the sorted prompts into batches (`in_turns`). A
    prompt is admitted as long as fewer rows run than its batch has, and if it fits into memory. So
    rows that come and go always have neighbours of similar lengths. With `objective="total"` the
    last answer shall be there as early as possible, with `"mean"` answers on average. As long as
    shorter prompts arrive, a long one waits.

    `answer_tokens` is the part of each length that is kept for the answer.
    """

    def __init__(
        self,
        latency: Latency,
        *,
        max_rows: int,
        answer_tokens: int,
        objective: Objective = "total",
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows must be >= 1 (got {max_rows})")
        if answer_tokens < 1:
            raise ConfigError(f"answer_tokens must be >= 1 (got {answer_tokens})")
        if objective not in ("total", "mean"):
            raise ConfigError(f"objective must be 'total' or 'mean' (got {objective!r})")
        self._latency = latency
        self._max_rows = max_rows
        self._answer_tokens = answer_tokens
        self._objective: Objective = objective
        self._waiting = _Waiting()
        self._planned: dict[int, tuple[int, int]] = {}  # Rows and draft length by prompt.
        self._output = MeanRatio(answer_tokens, weight=1.0)
        self._acceptance = MeanRatio(_ACCEPTANCE, weight=_TRIED)
        self.draft_length = 0  # Drafted tokens of a step, in the plan of those admitted last.

    def choose(self, waiting: Sequence[int], running: Sequence[int], room: int) -> list[int]:
        """The indices of the waiting prompts to admit now, the shortest first.

        All lengths are the most tokens that a prompt and its answer may take. Rows that run
        together all take as much memory as the longest of them, and `room` is how many tokens are
        free beside them. The next call expects what was chosen to be missing from `waiting`, and
        new prompts at its end: then it takes some µs, and some 10 ms for a new plan once in many
        calls. Any other change costs a new sorting.
        """
        self._waiting.update(waiting)
        window = list(itertools.islice(self._waiting, _WINDOW))
        if window and window[0].number not in self._planned:
            self._planned = self._new_plan(window, running)
        longest = max(running, default=0)
        capacity = room + len(running) * longest
        chosen: list[_Prompt] = []
        for prompt in window:
            rows, length = self._planned.get(prompt.number, (0, 0))
            num_rows, longest = len(running) + len(chosen) + 1, max(longest, prompt.length)
            if num_rows > rows or num_rows * longest > capacity:
                break
            chosen.append(prompt)
            self.draft_length = length
        return self._waiting.taken(chosen)

    def observe_step(self, step: BatchStep) -> None:
        """Learns what a step took and how many drafts were accepted."""
        rows, width, context = step.rows, step.width, step.context
        self._latency.verify.observe(rows, width, context, step.verify_seconds)
        if self._latency.draft is not None and width > 1:
            self._latency.draft.observe(rows, width - 1, 0.0, step.draft_seconds)
        accepted = step.num_tokens - rows
        if width > 1:  # Each row tried one draft more than were accepted, but for the last one.
            tried = min(accepted + rows, rows * (width - 1))
            self._acceptance.observe(min(accepted, tried), tried)

    def observe_answer(self, num_tokens: int) -> None:
        """Learns how long answers are."""
        self._output.observe(num_tokens, 1)

    def _new_plan(
        self, waiting: Sequence[_Prompt], running: Sequence[int]
    ) -> dict[int, tuple[int, int]]:
        """How many rows run together with each prompt, and how many tokens they draft.

        Rows that run are planned with those that wait, so that a prompt may join them. Memory is
        left out: what fits is decided when a prompt is admitted.
        """
        rows = [_Prompt(_RUNS, length) for length in running]
        prompts = sorted([*waiting, *rows], key=lambda prompt: prompt.length)
        output = min(max(round(self._output.value), 1), self._answer_tokens)
        tasks = [
            Task(max(prompt.length - self._answer_tokens, 0), min(output, prompt.length))
            for prompt in prompts
        ]
        acceptance = min(self._acceptance.value, _MOST_ACCEPTED)
        setting = Setting(self._latency, acceptance, self._max_rows, reads_alone=True)
        behind = len(self._waiting) - len(waiting)
        plan = in_turns(tasks, setting, objective=self._objective, num_behind=behind)
        return {
            prompts[index].number: (len(batch), length)
            for batch, length in zip(plan.batches, plan.lengths, strict=True)
            for index in batch
        }


class _Prompt(NamedTuple):
    number: int  # By arrival, or _RUNS.
    length: int


class _Waiting:
    """The waiting prompts, in their order of arrival and sorted by length."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._numbers: list[int] = []  # Rising, so that a prompt's index is found by bisection.
        self._num_arrived = 0
        self._sorted = SortedKeyList(key=lambda prompt: (prompt.length, prompt.number))

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[_Prompt]:
        return iter(self._sorted)

    def update(self, lengths: Sequence[int]) -> None:
        """Takes in what waits now; new prompts stand at the end."""
        if list(lengths[: len(self._lengths)]) != self._lengths:
            self._lengths.clear()
            self._numbers.clear()
            self._sorted.clear()
        for length in lengths[len(self._lengths) :]:
            self._lengths.append(length)
            self._numbers.append(self._num_arrived)
            self._sorted.add(_Prompt(self._num_arrived, length))
            self._num_arrived += 1

    def taken(self, prompts: Sequence[_Prompt]) -> list[int]:
        """Takes prompts out, and says where they stood in the order of arrival."""
        indices = [bisect_left(self._numbers, prompt.number) for prompt in prompts]
        for index in sorted(indices, reverse=True):
            del self._numbers[index], self._lengths[index]
        for prompt in prompts:
            self._sorted.remove(prompt)
        return indices
