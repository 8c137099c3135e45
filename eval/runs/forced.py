"""Answers that are forced, token by token, upon all methods alike: how fast a known text passes.

Knows nothing of what the texts are, nor of tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from eval.benches.dialogue import Padded
from eval.errors import EvalError
from eval.methods.method import Method
from eval.methods.names import rotated
from eval.runs.attempt import attempt


class Task(NamedTuple):
    """One text in ids: what is asked, the answer that is forced, and what predicts it."""

    name: str
    prompt_ids: list[int]
    answer_ids: list[int]
    predictions: dict[str, list[int]]  # of the methods that are given one


class Counted(NamedTuple):
    """Tokens behind the first one, steps and seconds of one answer."""

    tokens: int
    steps: int
    seconds: float


Counts = dict[str, dict[str, list[Counted]]]  # by method, then by kind of edit


def measure(
    model: Any, tasks: Sequence[Task], methods: Sequence[Method], *, warm_up: Sequence[Task] = ()
) -> Counts:
    """Lets all methods write all answers; who goes first changes from task to task."""
    counts: Counts = {method.name: defaultdict(list) for method in methods}
    for task in warm_up:
        for method in methods:
            _answered(model, method, task)
    for number, task in enumerate(tasks):
        for method in rotated(methods, number):
            counts[method.name][task.name].append(_answered(model, method, task))
        print(f"{number + 1} of {len(tasks)}: {task.name}", flush=True)
    return counts


def _answered(model: Any, method: Method, task: Task) -> Counted:
    """One forced answer of one method, which keeps the arguments of its own."""
    start = len(task.prompt_ids)

    def allowed(_row: int, ids: torch.Tensor) -> list[int]:
        # Behind the end drafts are checked too, whatever is allowed there.
        return [task.answer_ids[min(len(ids) - start, len(task.answer_ids) - 1)]]

    own = method.arguments
    more = {"prediction": task.predictions[method.name]} if method.name in task.predictions else {}
    method.arguments = {**own, **more, "prefix_allowed_tokens_fn": allowed}
    ids = torch.tensor([task.prompt_ids], device=model.device)
    asked = {"max_new_tokens": len(task.answer_ids), "temperature": 0.0, "seed": 0}
    outcome = attempt(model, method, Padded(ids, torch.ones_like(ids)), **asked)
    method.arguments = own
    if outcome.new_ids != [task.answer_ids]:
        raise EvalError(f"{method.name!r} must write the answer (got {outcome.error or 'another'})")
    numbers = outcome.numbers
    return Counted(len(task.answer_ids) - 1, numbers["num_steps"], numbers["seconds"])
