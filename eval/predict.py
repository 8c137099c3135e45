"""What a prediction brings where a text is edited: tokens per step and speed.

    python -m eval predict --model PATH --dtype bfloat16 --classes 4

Classes of Python's own library are edited: a name changes, a docstring is added, a method is
deleted. The prompt holds the order and, but for --hide, the class; the prediction is the class
before the edit. A small model does not edit well, so the right answer is forced, token by token,
upon all methods alike, by an argument of generate() itself (prefix_allowed_tokens_fn). So what is
measured is how fast a known text passes, as if the model wrote it. Tables of selfspec learn what
the model itself would say, which the forced text often is not. All methods take turns, edit by
edit, after one edit that doesn't count. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from eval.benches.dialogue import Padded, Prompter
from eval.benches.edits import Edit, stdlib_edits
from eval.benches.questions import Question
from eval.errors import EvalError
from eval.methods.method import Method, SelfSpecMethod
from eval.methods.names import OURS, STOCK, rotated
from eval.methods.registry import new_method
from eval.models.loading import load_asked, load_tokenizer
from eval.options import add_drafting, add_model, check_at_least, drafting_knobs
from eval.report.statistics import OVERALL
from eval.report.table import Table
from eval.runs.attempt import attempt
from eval.runs.environment import told, where
from selfspec import SelfSpec

RIGHT, WRONG = "with a prediction", "with a wrong one"


class Task(NamedTuple):
    """One edit in ids: what is asked, the answer that is forced, and what predicts it."""

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


def run(options: argparse.Namespace) -> int:
    """Measures all methods, and prints a table and the JSON line."""
    check_at_least(options, 1, "classes")
    edits = stdlib_edits(options.classes + 1)
    tasks = tasks_of(edits, load_tokenizer(options.model), hide=options.hide)
    model, knobs = load_asked(options), drafting_knobs(options)
    found = _told(measure(model, tasks[3:], new_methods(knobs), warm_up=tasks[:1]))
    print(_table(found).markdown())
    print(json.dumps(told("predict", options, **where(model), knobs=knobs, methods=found)))
    return 0


def tasks_of(edits: Sequence[Edit], tokenizer: Any, *, hide: bool = False) -> list[Task]:
    """The edits in ids; the wrong prediction of each is the class of the edit three before it."""
    prompter = Prompter(tokenizer)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text + "\n", add_special_tokens=False)["input_ids"]
        return found

    def task(edit: Edit, other: Edit) -> Task:
        order = f"{edit.order} Write the whole class again. Answer with the code alone."
        turn = order if hide else f"{order}\n\n{edit.before}"
        question = Question(0, edit.task, (turn,), f"# {turn}\n\n\n")
        predictions = {RIGHT: ids(edit.before), WRONG: ids(other.before)}
        return Task(edit.task, prompter.prompt_ids(question, []), ids(edit.after), predictions)

    return [task(edit, edits[index - 3]) for index, edit in enumerate(edits)]


def new_methods(knobs: dict[str, Any]) -> list[Method]:
    """Stock, prompt lookup, and selfspec without a prediction, with one, and with a wrong one."""
    ours = [SelfSpecMethod(name, SelfSpec(**knobs)) for name in (OURS, RIGHT, WRONG)]
    return [new_method(STOCK), new_method("prompt-lookup"), *ours]


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


def _told(counts: Counts) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens per step and speed-up over stock of each method, by kind of edit and overall."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, by_task in counts.items():
        found[name] = {}
        for task in (*by_task, OVERALL):
            tokens, steps, seconds = _summed(by_task, task)
            stock_seconds = _summed(counts[STOCK], task).seconds
            found[name][task] = {
                "tokens_per_step": round(tokens / max(steps, 1), 2),
                "speed_up": round(stock_seconds / seconds, 3),
                "tokens_per_second": round(tokens / seconds, 1),
            }
    return found


def _summed(by_task: dict[str, list[Counted]], task: str) -> Counted:
    lists = by_task.values() if task == OVERALL else [by_task[task]]
    found = [counted for counts in lists for counted in counts]
    tokens, steps, seconds = (sum(column) for column in zip(*found, strict=True))
    return Counted(int(tokens), int(steps), seconds)


def _table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    cell = "{%s[tokens_per_step]:.2f} ({%s[speed_up]:.2f}x)"
    columns = {"method": "{name}", **{task: cell % (task, task) for task in found[STOCK]}}
    rows = ({**by_task, "name": name} for name, by_task in found.items())
    note = (
        "Tokens per step of forced answers; in brackets the speed-up over stock, prompts and all."
    )
    return Table.of("Edits", columns, rows, note)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--dtype", default="float32", help="float32, bfloat16, float16; auto: the checkpoint's")
    add("--threads", type=int, metavar="N", help="of the CPU; default: torch's own number")
    add(
        "--classes", type=int, default=4, metavar="N", help="each is edited three times; default: 4"
    )
    add("--hide", action="store_true", help="prompts without the class: only predictions know it")
    add_drafting(parser)
    parser.set_defaults(device="cpu")
