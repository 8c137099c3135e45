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
from collections.abc import Sequence
from typing import Any

from eval.benches.dialogue import Prompter
from eval.benches.edits import Edit, stdlib_edits
from eval.benches.questions import Question
from eval.methods.method import Method, SelfSpecMethod
from eval.methods.names import OURS, STOCK
from eval.methods.registry import new_method
from eval.models.loading import load_asked, load_tokenizer
from eval.options import add_drafting, add_model, check_at_least, drafting_knobs
from eval.report.statistics import OVERALL
from eval.report.table import Table
from eval.runs.environment import told, where
from eval.runs.forced import Counted, Counts, Task, measure
from selfspec import SelfSpec

RIGHT, WRONG = "with a prediction", "with a wrong one"


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
