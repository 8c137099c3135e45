"""What a prediction brings where a text is edited: tokens per step and speed.

    python -m eval predict --model PATH --dtype bfloat16 --functions 4

Functions of Python's own library are edited: a name changes, a docstring is added, or taken out.
The prompt holds the order and, but for --hide, the function; the prediction is the function before
the edit. A small model does not edit well, so the right answer is forced, token by token, upon all
methods alike, by an argument of generate() itself (prefix_allowed_tokens_fn). So what is measured
is how fast a known text passes, as if the model wrote it. Tables of selfspec learn what the model
itself would say, which the forced text often is not. All methods take turns, edit by edit, after
one edit that doesn't count. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from eval.benches.dialogue import Prompter
from eval.benches.questions import Question
from eval.benches.stdlib import Edit, stdlib_edits
from eval.methods.method import Method, SelfSpecMethod
from eval.methods.names import OURS, STOCK
from eval.methods.registry import new_method
from eval.models.loading import load_asked, load_tokenizer
from eval.options import add_drafting, add_model, check_at_least, drafting_knobs
from eval.report.rows import frame_of
from eval.report.statistics import by_task
from eval.report.tables import tasks_table
from eval.runs.environment import told, where
from eval.runs.forced import Task, measure
from selfspec import SelfSpec

RIGHT, WRONG = "with a prediction", "with a wrong one"
_NOTE = "Forced answers; the speed-up is over stock, prompts and all."


def run(options: argparse.Namespace) -> int:
    """Measures all methods, and prints two tables and the JSON line."""
    check_at_least(options, 1, "functions")
    edits = stdlib_edits(options.functions + 1)
    tasks = tasks_of(edits, load_tokenizer(options.model), hide=options.hide)
    model, knobs = load_asked(options), drafting_knobs(options)
    measure(model, tasks[:1], new_methods(knobs))
    figures = by_task(frame_of(measure(model, tasks[3:], new_methods(knobs))))
    shown = {"methods": figures, "left_out": {}}
    for figure, title in (("tokens_per_step", "Tokens per step"), ("speed_up", "Speed-up")):
        print(tasks_table(shown, f"{title} of edits", figure)._replace(note=_NOTE).markdown())
    print(json.dumps(told("predict", options, **where(model), knobs=knobs, methods=figures)))
    return 0


def tasks_of(edits: Sequence[Edit], tokenizer: Any, *, hide: bool = False) -> list[Task]:
    """The edits in ids; the wrong prediction of each is the function of three edits before it."""
    prompter = Prompter(tokenizer)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text + "\n", add_special_tokens=False)["input_ids"]
        return found

    def task(edit: Edit, other: Edit) -> Task:
        order = f"{edit.order} Write the whole function again. Answer with the code alone."
        turn = order if hide else f"{order}\n\n{edit.before}"
        question = Question(0, edit.task, (turn,), f"# {turn}\n\n\n")
        predictions = {RIGHT: ids(edit.before), WRONG: ids(other.before)}
        return Task(edit.task, prompter.prompt_ids(question, []), ids(edit.after), predictions)

    return [task(edit, edits[index - 3]) for index, edit in enumerate(edits)]


def new_methods(knobs: dict[str, Any]) -> list[Method]:
    """Stock, prompt lookup, and selfspec without a prediction, with one, and with a wrong one."""
    ours = [SelfSpecMethod(name, SelfSpec(**knobs)) for name in (OURS, RIGHT, WRONG)]
    return [new_method(STOCK), new_method("prompt-lookup"), *ours]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, dtype="float32", device="cpu")
    functions = "each is edited three times; default: %(default)s"
    add("--functions", type=int, default=4, metavar="N", help=functions)
    hide = "prompts without the function: only predictions know it"
    add("--hide", action="store_true", help=hide)
    add_drafting(parser)
