"""The ways of serving the users of a cell that are compared: the planned one, and its baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from eval.edge.latency import Latency
from eval.edge.network import Network, User, bandwidth_shares, upload_seconds
from eval.edge.program import Plan, in_batches, in_pipeline, in_turns
from eval.edge.work import Setting, Sorted, Task

__all__ = ["DESCRIPTIONS", "PLANNED", "Served", "serve"]

PLANNED, UNIFORM = "planned", "uniform bandwidth"
DESCRIPTIONS = {
    PLANNED: "draft length and batches by the dynamic program, a pipeline, bandwidth by need",
    "no speculation": "the large model alone, one token in a step, the best batches",
    "no pipeline": "drafts and verifies in turns, the best batches and draft lengths",
    "largest batch": "the pipeline, in each batch as many as fit, the best draft length",
    "heuristic": "the pipeline, batches of equal size, as many as the root of the users, 4 drafts",
    "one boundary": "as planned, with the paper's rule: one split is kept for each prompt",
    UNIFORM: "as planned, but each user has the same share of the band",
}
_HEURISTIC_LENGTH = 4
# Prompts are sorted by their input, as in the paper, or by all their tokens: what plans better.
_KEYS: tuple[Callable[[Task], int], ...] = (lambda task: task.input_length, sum)


class Served(NamedTuple):
    """The seconds until all prompts have arrived, and then until all answers are complete."""

    upload: float
    inference: float
    plan: Plan

    @property
    def seconds(self) -> float:
        """From the first bit to the last token."""
        return self.upload + self.inference


def serve(network: Network, users: Sequence[User]) -> dict[str, Served]:
    """What each scheme takes for the same users."""
    setting, tasks = network.setting(), [user.task for user in users]
    plans = {
        PLANNED: _best(lambda given: in_pipeline(given, setting), tasks),
        "no speculation": _best(lambda given: in_turns(given, _plain(setting)), tasks),
        "no pipeline": _best(lambda given: in_turns(given, setting), tasks),
        "largest batch": _best(lambda given: _largest(given, setting), tasks),
        "heuristic": _equal(sorted(tasks), setting),
        "one boundary": _best(lambda given: in_pipeline(given, setting, keep=1), tasks),
    }
    hertz = network.bandwidth_mhz * 1e6
    least, _ = bandwidth_shares(users, hertz)
    uniform = upload_seconds(users, [1 / len(users)] * len(users), hertz)
    served = {name: Served(least, plan.seconds, plan) for name, plan in plans.items()}
    return {**served, UNIFORM: served[PLANNED]._replace(upload=uniform)}


def _best(plan: Callable[[Sequence[Task]], Plan], tasks: Sequence[Task]) -> Plan:
    plans = [plan(sorted(tasks, key=key)) for key in _KEYS]
    return min(plans, key=lambda plan: plan.seconds)


def _plain(setting: Setting) -> Setting:
    return replace(setting, latency=Latency(setting.latency.verify), lengths=(0,))


def _largest(tasks: Sequence[Task], setting: Setting) -> Plan:
    """Batches from the longest prompt down, each with as many as fit."""
    work, batches, end = Sorted(tasks, setting), [], len(tasks)
    while end:
        start = work.starts(end)[-1]
        batches.append(range(start, end))
        end = start
    return in_batches(tasks, setting, batches[::-1])


def _equal(tasks: Sequence[Task], setting: Setting) -> Plan:
    """Batches of equal size, smaller ones where they do not fit."""
    setting = replace(setting, lengths=(_HEURISTIC_LENGTH,))
    work, batches, end = Sorted(tasks, setting), [], len(tasks)
    size = math.ceil(len(tasks) / max(round(math.sqrt(len(tasks))), 1))
    while end:
        start = max(work.starts(end)[-1], end - size)
        batches.append(range(start, end))
        end = start
    return in_batches(tasks, setting, batches[::-1])
