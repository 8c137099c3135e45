"""Which sorted prompts run together, and how many tokens a step drafts: two dynamic programs.

Both split a sorted list of prompts into batches of neighbours. `in_turns` is for a device that does
one thing after the other: a batch runs to its end before the next one starts. `in_pipeline` is for
two devices, as in "Efficient LLM Inference over Heterogeneous Edge Networks with Speculative
Decoding": in each step all batches are drafted one after the other, and a batch is verified while
the next one is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from eval.edge.latency import Array
from eval.edge.work import Setting, Sorted, Task

__all__ = ["Objective", "Plan", "in_batches", "in_pipeline", "in_turns"]

Objective = Literal["total", "mean"]


class Plan(NamedTuple):
    """Batches in the order in which they run, each with the tokens that a step drafts."""

    batches: tuple[range, ...]  # Indices of the sorted prompts.
    lengths: tuple[int, ...]
    seconds: float  # Until the last prompt is done, or the mean over prompts until each is done.


def in_turns(
    tasks: Sequence[Task],
    setting: Setting,
    *,
    objective: Objective = "total",
) -> Plan:
    """The best plan of all where batches of neighbours run one after the other, in this order.

    With `objective="total"` the last prompt is done as early as possible; with `"mean"`, prompts
    are done as early as possible on average. Each batch has a draft length of its own. The time
    grows with prompts · largest batch · draft lengths; 64 prompts in batches of up to 16 take some
    10 ms.
    """
    work = Sorted(tasks, setting)
    num_tasks = len(tasks)
    least = np.zeros(num_tasks + 1)
    chosen: list[tuple[int, int]] = [(0, 0)]  # The start and the draft length of the last batch.
    for end in range(1, num_tasks + 1):
        starts = np.array(work.starts(end))
        by_length = work.seconds(end)
        # A batch delays all prompts that are not done before it.
        waiting = num_tasks - starts if objective == "mean" else 1
        values = least[starts] + by_length.min(axis=0) * waiting
        index = int(values.argmin())
        least[end] = values[index]
        length = setting.lengths[int(by_length[:, index].argmin())]
        chosen.append((int(starts[index]), length))
    divisor = max(num_tasks, 1) if objective == "mean" else 1
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


def in_batches(
    tasks: Sequence[Task],
    setting: Setting,
    batches: Sequence[range],
    *,
    objective: Objective = "total",
) -> Plan:
    """The same pipeline with batches as they are given; only the best draft length is found."""
    work = Sorted(tasks, setting)
    plans = []
    for length in setting.lengths:
        of_length = _OfLength(work, length, objective)
        labels = of_length.none()
        for batch in batches:
            labels = of_length.extended(labels, batch)
        plans.append(of_length.plan(labels))
    return min(plans, key=lambda plan: plan.seconds)


def _with_length(work: Sorted, length: int, objective: Objective, keep: int) -> Plan:
    of_length = _OfLength(work, length, objective)
    found = [of_length.none()]
    for end in range(1, len(work.inputs) + 1):
        ways = [of_length.extended(found[start], range(start, end)) for start in work.starts(end)]
        found.append(of_length.best(_joined(ways), keep))
    return of_length.plan(found[-1])


class _OfLength:
    """Builds splits batch by batch, where each step drafts so many tokens."""

    def __init__(self, work: Sorted, length: int, objective: Objective) -> None:
        self._work = work
        self._length = length
        self._num_steps = work.num_steps(length)
        self._for_mean = objective == "mean"
        steps = np.arange(self._num_steps.max(initial=0))
        # How often each step counts: for the mean, once for each prompt that goes on behind it.
        goes_on = (self._num_steps[:, None] > steps + 1).sum(axis=0)
        self._counts = goes_on if self._for_mean else np.ones(len(steps))

    def none(self) -> _Labels:
        """No batch yet."""
        zeros = np.zeros((1, len(self._counts)))
        return _Labels(zeros, zeros, np.zeros(1), [()])

    def extended(self, before: _Labels, batch: range) -> _Labels:
        """All kept splits of what lies before a batch, with this batch behind them."""
        draft, verify = self._work.stages(batch, self._length, self._num_steps)
        drafted = before.drafted + draft
        verified = np.maximum(drafted, before.verified) + verify
        waited = before.waited
        if self._for_mean:
            # Each prompt is done when its last step is verified.
            last = self._num_steps[batch.start : batch.stop].astype(int) - 1
            waited = waited + verified[:, last].sum(axis=1)
        return _Labels(drafted, verified, waited, [(*split, batch) for split in before.batches])

    def best(self, labels: _Labels, keep: int) -> _Labels:
        """The best ones, none of which is later in everything than another one."""
        order = np.argsort(self._values(labels), kind="stable")
        rows = np.hstack([labels.drafted, labels.verified, labels.waited[:, None]])
        kept: list[int] = []
        for index in order.tolist():
            if len(kept) == keep:
                break
            if not (rows[kept] <= rows[index]).all(axis=1).any():
                kept.append(index)
        batches = [labels.batches[index] for index in kept]
        return _Labels(labels.drafted[kept], labels.verified[kept], labels.waited[kept], batches)

    def plan(self, labels: _Labels) -> Plan:
        """The best of some splits of all prompts."""
        values = self._values(labels)
        batches = labels.batches[int(values.argmin())]
        divisor = max(len(self._num_steps), 1) if self._for_mean else 1
        return Plan(batches, (self._length,) * len(batches), float(values.min()) / divisor)

    def _values(self, labels: _Labels) -> Array:
        return np.asarray(labels.waited + labels.verified @ self._counts)


def _joined(ways: Sequence[_Labels]) -> _Labels:
    batches = [split for way in ways for split in way.batches]
    drafted, verified, waited = (
        np.concatenate(parts) for parts in zip(*(way[:3] for way in ways), strict=True)
    )
    return _Labels(drafted, verified, waited, batches)
