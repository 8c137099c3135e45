"""Which sorted prompts run together, and how many tokens a step drafts: two dynamic programs.

Both split a sorted list of prompts into batches of neighbours. `in_turns` is for a device that does
one thing after the other: a batch runs to its end before the next one starts. `in_pipeline` is for
two devices, as in "Efficient LLM Inference over Heterogeneous Edge Networks with Speculative
Decoding": in each step all batches are drafted one after the other, and a batch is verified while
the next one is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eval.edge.latency import Array
from eval.edge.work import Setting, Sorted, Task

__all__ = ["Plan", "in_batches", "in_pipeline", "in_turns"]


class Plan(NamedTuple):
    """Batches in the order in which they run, each with the tokens that a step drafts."""

    batches: tuple[range, ...]  # Indices of the sorted prompts.
    lengths: tuple[int, ...]
    seconds: float  # Until the last prompt is done.


def in_turns(tasks: Sequence[Task], setting: Setting) -> Plan:
    """The best plan of all where batches of neighbours run one after the other, in this order.

    Each batch has a draft length of its own. The time grows with prompts · largest batch · draft
    lengths; 64 prompts in batches of up to 16 take some 10 ms.
    """
    work = Sorted(tasks, setting)
    num_tasks = len(tasks)
    least = np.zeros(num_tasks + 1)
    chosen: list[tuple[int, int]] = [(0, 0)]  # The start and the draft length of the last batch.
    for end in range(1, num_tasks + 1):
        starts = np.array(work.starts(end))
        by_length = work.seconds(end)
        values = least[starts] + by_length.min(axis=0)
        index = int(values.argmin())
        least[end] = values[index]
        length = setting.lengths[int(by_length[:, index].argmin())]
        chosen.append((int(starts[index]), length))
    return _traced(chosen, float(least[-1]))


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
    batches: list[tuple[range, ...]]


def in_pipeline(tasks: Sequence[Task], setting: Setting, *, keep: int = 16) -> Plan:
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
    plans = [_with_length(work, length, keep) for length in setting.lengths]
    return min(plans, key=lambda plan: plan.seconds)


def in_batches(tasks: Sequence[Task], setting: Setting, batches: Sequence[range]) -> Plan:
    """The same pipeline with batches as they are given; only the best draft length is found."""
    work = Sorted(tasks, setting)
    plans = []
    for length in setting.lengths:
        of_length = _OfLength(work, length)
        labels = of_length.none()
        for batch in batches:
            labels = of_length.extended(labels, batch)
        plans.append(of_length.plan(labels))
    return min(plans, key=lambda plan: plan.seconds)


def _with_length(work: Sorted, length: int, keep: int) -> Plan:
    of_length = _OfLength(work, length)
    found = [of_length.none()]
    for end in range(1, len(work.inputs) + 1):
        ways = [of_length.extended(found[start], range(start, end)) for start in work.starts(end)]
        found.append(of_length.best(_joined(ways), keep))
    return of_length.plan(found[-1])


class _OfLength:
    """Builds splits batch by batch, where each step drafts so many tokens."""

    def __init__(self, work: Sorted, length: int) -> None:
        self._work = work
        self._length = length
        self._num_steps = work.num_steps(length)

    def none(self) -> _Labels:
        """No batch yet."""
        zeros = np.zeros((1, int(self._num_steps.max(initial=0))))
        return _Labels(zeros, zeros, [()])

    def extended(self, before: _Labels, batch: range) -> _Labels:
        """All kept splits of what lies before a batch, with this batch behind them."""
        draft, verify = self._work.stages(batch, self._length, self._num_steps)
        drafted = before.drafted + draft
        verified = np.maximum(drafted, before.verified) + verify
        return _Labels(drafted, verified, [(*split, batch) for split in before.batches])

    def best(self, labels: _Labels, keep: int) -> _Labels:
        """The best ones, none of which is later in everything than another one."""
        order = np.argsort(_seconds(labels), kind="stable")
        rows = np.hstack([labels.drafted, labels.verified])
        kept: list[int] = []
        for index in order.tolist():
            if len(kept) == keep:
                break
            if not (rows[kept] <= rows[index]).all(axis=1).any():
                kept.append(index)
        batches = [labels.batches[index] for index in kept]
        return _Labels(labels.drafted[kept], labels.verified[kept], batches)

    def plan(self, labels: _Labels) -> Plan:
        """The best of some splits of all prompts."""
        seconds = _seconds(labels)
        batches = labels.batches[int(seconds.argmin())]
        return Plan(batches, (self._length,) * len(batches), float(seconds.min()))


def _seconds(labels: _Labels) -> Array:
    """When the last step of each split is verified."""
    return np.asarray(labels.verified.sum(axis=1))


def _joined(ways: Sequence[_Labels]) -> _Labels:
    batches = [split for way in ways for split in way.batches]
    drafted = np.concatenate([way.drafted for way in ways])
    verified = np.concatenate([way.verified for way in ways])
    return _Labels(drafted, verified, batches)
