"""Which sorted prompts run together, and how many tokens a step drafts: two dynamic programs.

Both split a sorted list of prompts into batches of neighbours. `in_turns` is for a device that does
one thing after the other: a batch runs to its end before the next one starts. `in_pipeline` is for
two devices, as in "Efficient LLM Inference over Heterogeneous Edge Networks with Speculative
Decoding": in each step all batches are drafted one after the other, and a batch is verified while
the next one is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from selfspec.batch.latency import Array, Latency
from selfspec.errors import ConfigError

__all__ = [
    "LENGTHS",
    "Objective",
    "Plan",
    "Setting",
    "Task",
    "in_pipeline",
    "in_turns",
    "tokens_per_step",
]

LENGTHS = tuple(range(11))  # The draft lengths that are tried.

Objective = Literal["total", "mean"]


class Task(NamedTuple):
    """One prompt: its tokens, and the tokens that its answer is expected to have."""

    input_length: int
    output_length: int


class Plan(NamedTuple):
    """Batches in the order in which they run, each with the tokens that a step drafts."""

    batches: tuple[range, ...]  # Indices of the sorted prompts.
    lengths: tuple[int, ...]
    seconds: float  # Until the last prompt is done, or the mean over prompts until each is done.


@dataclass(frozen=True)
class Setting:
    """What a plan is made for.

    `acceptance` is the chance that a drafted token is accepted if those before it were.
    `max_tokens` is the memory of a batch: rows times the tokens of its longest row.
    `reads_alone` says that each prompt is read by a forward of its own, without padding.
    """

    latency: Latency
    acceptance: float
    max_rows: int
    max_tokens: float = math.inf
    lengths: Sequence[int] = LENGTHS
    reads_alone: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1:
            raise ConfigError(f"acceptance must be >= 0 and < 1 (got {self.acceptance})")
        if self.max_rows < 1:
            raise ConfigError(f"max_rows must be >= 1 (got {self.max_rows})")
        if not self.lengths or min(self.lengths) < 0:
            raise ConfigError(f"lengths must be draft lengths >= 0 (got {self.lengths})")


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
            raise ConfigError(
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
        if self.setting.reads_alone:
            alone = self.inputs[last][::-1]
            return np.cumsum(latency.reading_s(1.0, alone) + latency.draft_reading_s(1.0, alone))
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


def in_turns(
    tasks: Sequence[Task],
    setting: Setting,
    *,
    objective: Objective = "total",
    num_behind: int = 0,
) -> Plan:
    """The best plan of all where batches of neighbours run one after the other, in this order.

    With `objective="total"` the last prompt is done as early as possible; with `"mean"`, prompts
    are done as early as possible on average, where `num_behind` more wait behind them. Each batch
    has a draft length of its own. The time grows with prompts · largest batch · draft lengths; 64
    prompts in batches of up to 16 take some 10 ms.
    """
    work = Sorted(tasks, setting)
    num_tasks = len(tasks)
    least = np.zeros(num_tasks + 1)
    chosen: list[tuple[int, int]] = [(0, 0)]  # The start and the draft length of the last batch.
    for end in range(1, num_tasks + 1):
        starts = np.array(work.starts(end))
        by_length = work.seconds(end)
        # A batch delays all prompts that are not done before it.
        waiting = num_tasks - starts + num_behind if objective == "mean" else 1
        values = least[starts] + by_length.min(axis=0) * waiting
        index = int(values.argmin())
        least[end] = values[index]
        length = setting.lengths[int(by_length[:, index].argmin())]
        chosen.append((int(starts[index]), length))
    divisor = max(num_tasks + num_behind, 1) if objective == "mean" else 1
    return _traced(chosen, float(least[-1]) / divisor)


def _traced(chosen: Sequence[tuple[int, int]], seconds: float) -> Plan:
    """The plan of which the last batch of each prefix is known."""
    batches, lengths, end = [], [], len(chosen) - 1
    while end:
        start, length = chosen[end]
        batches.append(range(start, end))
        lengths.append(length)
        end = start
    return Plan(tuple(reversed(batches)), tuple(reversed(lengths)), seconds)


class _Labels(NamedTuple):
    """Ways to split the prompts of a prefix, with what the batches behind them depend on."""

    drafted: Array  # (K, steps): when the last batch is drafted, from the beginning of each step.
    verified: Array  # (K, steps): when it is verified.
    waited: Array  # (K,): the part of the mean that is known already.
    batches: list[tuple[range, ...]]


def in_pipeline(
    tasks: Sequence[Task],
    setting: Setting,
    *,
    objective: Objective = "total",
    keep: int = 16,
) -> Plan:
    """A plan where two devices work side by side: one drafts, the other one verifies.

    With j the end of the last batch but one, in each step s a batch that ends at n is drafted and
    verified at

        f1_s(n) = f1_s(j) + draft_s,    f2_s(n) = max(f1_s(n), f2_s(j)) + verify_s.

    The paper keeps, for each n, the boundary j with the least sum of f2 over the steps. A split
    with a greater sum may still end earlier, because it was drafted earlier. So the best `keep`
    splits of each prefix are kept, without those that are later in everything than another one:
    ``keep=1`` is the paper's rule, and enough of them are exact. All batches have the same draft
    length. The time grows with prompts · largest batch · draft lengths · steps · `keep`.
    """
    work = Sorted(tasks, setting)
    plans = [_with_length(work, length, objective, keep) for length in setting.lengths]
    return min(plans, key=lambda plan: plan.seconds)


def _with_length(work: Sorted, length: int, objective: Objective, keep: int) -> Plan:
    num_tasks, num_steps = len(work.inputs), work.num_steps(length)
    if not num_tasks:
        return Plan((), (), 0.0)
    steps = np.arange(num_steps.max())
    zeros = np.zeros((1, len(steps)))
    found = [_Labels(zeros, zeros, np.zeros(1), [()])]
    # For the mean, a step counts once for each prompt that goes on behind it.
    counts = (num_steps[:, None] > steps + 1).sum(axis=0) if objective == "mean" else 1 + 0 * steps
    for end in range(1, num_tasks + 1):
        ways = [
            _extended(work, found[start], range(start, end), length, num_steps, objective)
            for start in work.starts(end)
        ]
        found.append(_best(_joined(ways), counts, keep))
    values = found[-1].waited + found[-1].verified @ counts
    batches = found[-1].batches[int(values.argmin())]
    divisor = num_tasks if objective == "mean" else 1
    return Plan(batches, (length,) * len(batches), float(values.min()) / divisor)


def _extended(
    work: Sorted,
    before: _Labels,
    batch: range,
    length: int,
    num_steps: Array,
    objective: Objective,
) -> _Labels:
    """All kept splits of what lies before a batch, with this batch behind them."""
    draft, verify = work.stages(batch, length, num_steps)
    drafted = before.drafted + draft
    verified = np.maximum(drafted, before.verified) + verify
    waited = before.waited
    if objective == "mean":
        # Each prompt is done when its last step is verified.
        last = num_steps[batch.start : batch.stop].astype(int) - 1
        waited = waited + verified[:, last].sum(axis=1)
    return _Labels(drafted, verified, waited, [(*split, batch) for split in before.batches])


def _joined(ways: Sequence[_Labels]) -> _Labels:
    batches = [split for way in ways for split in way.batches]
    drafted, verified, waited = (
        np.concatenate(parts) for parts in zip(*(way[:3] for way in ways), strict=True)
    )
    return _Labels(drafted, verified, waited, batches)


def _best(labels: _Labels, counts: Array, keep: int) -> _Labels:
    """The best ones, none of which is later in everything than another one."""
    order = np.argsort(labels.waited + labels.verified @ counts, kind="stable")
    rows = np.hstack([labels.drafted, labels.verified, labels.waited[:, None]])
    kept: list[int] = []
    for index in order.tolist():
        if len(kept) == keep:
            break
        if not (rows[kept] <= rows[index]).all(axis=1).any():
            kept.append(index)
    batches = [labels.batches[index] for index in kept]
    return _Labels(labels.drafted[kept], labels.verified[kept], labels.waited[kept], batches)
