"""Answers that are forced upon all methods alike, token by token: how fast a known text passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from eval.errors import EvalError
from eval.methods.method import Method
from eval.methods.names import rotated
from eval.report.rows import Line
from eval.runs.attempt import attempt


class Forced(NamedTuple):
    """What is asked in ids, the answer that is forced, and what predicts it."""

    name: str
    prompt_ids: list[int]
    answer_ids: list[int]
    predictions: dict[str, list[int]]  # of the methods that are given one


def measure(model: Any, tasks: Sequence[Forced], methods: Sequence[Method]) -> list[Line]:
    """A line for each answer; who goes first changes from task to task."""
    lines = []
    for number, task in enumerate(tasks):
        for method in rotated(methods, number):
            about = {"method": method.name, "task": task.name, "question": number, "turn": 0}
            about["round"] = 0
            lines.append({**about, "numbers": _answered(model, method, task)})
        print(f"{number + 1} of {len(tasks)}: {task.name}", flush=True)
    return lines


def _answered(model: Any, method: Method, task: Forced) -> dict[str, Any]:
    """The numbers of one forced answer of one method, which keeps the arguments of its own."""
    start = len(task.prompt_ids)

    def allowed(_row: int, ids: torch.Tensor) -> list[int]:
        # Behind the end drafts are checked too, whatever is allowed there.
        return [task.answer_ids[min(len(ids) - start, len(task.answer_ids) - 1)]]

    own = method.arguments
    more = {"prediction": task.predictions[method.name]} if method.name in task.predictions else {}
    method.arguments = {**own, **more, "prefix_allowed_tokens_fn": allowed}
    asked = {"max_new_tokens": len(task.answer_ids), "temperature": 0.0, "seed": 0}
    outcome = attempt(model, method, task.prompt_ids, **asked)
    method.arguments = own
    if outcome.new_ids != task.answer_ids:
        raise EvalError(f"{method.name!r} must write the answer (got {outcome.error or 'another'})")
    return outcome.numbers
