"""What a prediction brings where a text is edited: tokens per step and speed.

    python -m eval predict --model PATH --dtype bfloat16 --functions 4

Functions of Python's own library are edited: a name changes, a docstring is added, or taken out.
The prompt holds the order and, but for --hide, the function; the prediction is the function before
the edit. A small model does not edit well, so the right answer is forced, token by token, upon all
methods alike, by an argument of generate() itself (prefix_allowed_tokens_fn). So what is measured
is how fast a known text passes, as if the model wrote it. Tables of selfspec learn what the model
itself would say, which the forced text often is not. All methods take turns, edit by edit, after
one edit that doesn't count. The last line is one JSON object.

    python -m eval predict --random qwen3.5-0.8b --layers 8 --shares 0 50 80 95

does the same with random texts and a random model with a running state, of which only the times
count. Predictions have the text's token in a given share of the places, and another one elsewhere.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch

from eval.benches.dialogue import Prompter
from eval.benches.questions import Question
from eval.benches.stdlib import Edit, stdlib_edits
from eval.methods.method import Method, SelfSpecMethod
from eval.methods.names import OURS, STOCK
from eval.methods.registry import new_method
from eval.models.hybrid import SHAPES, random_model
from eval.models.loading import load_asked, load_tokenizer
from eval.options import add_drafting, add_model, check_at_least, drafting_knobs
from eval.report.rows import frame_of
from eval.report.statistics import by_task
from eval.report.tables import tasks_table
from eval.runs.environment import tell, where
from eval.runs.forced import Forced, measure
from selfspec import SelfSpec

RIGHT, WRONG = "with a prediction", "with a wrong one"
_NOTE = "Forced answers; the speed-up is over stock, prompts and all."
_LOOKUP = "prompt-lookup"  # transformers has none for models with a running state.
_NUM_PROMPT = 32  # Tokens of a random prompt.


def run(options: argparse.Namespace) -> int:
    """Measures all methods, and prints two tables and the JSON line."""
    check_at_least(options, 1, "functions", "layers", "texts", "tokens")
    knobs = drafting_knobs(options)
    if options.random is None:
        edits = stdlib_edits(options.functions + 1)
        tasks = tasks_of(edits, load_tokenizer(options.model), hide=options.hide)
        model, num_first = load_asked(options), 3
        names = [_LOOKUP, OURS, RIGHT, WRONG]
    else:
        model, num_first = _random(options), 1
        names = list(map(name_of, options.shares))
        num_ids = model.config.vocab_size
        tasks = [random_task(n, options, num_ids) for n in range(options.texts + 1)]
    methods = new_methods(knobs, names)
    measure(model, tasks[:1], methods)
    figures = by_task(frame_of(measure(model, tasks[num_first:], methods)))
    shown = {"methods": figures, "left_out": {}}
    for figure, title in (("tokens_per_step", "Tokens per step"), ("speed_up", "Speed-up")):
        print(tasks_table(shown, title, figure)._replace(note=_NOTE).markdown())
    return tell("predict", options, **where(model), methods=figures)


def _random(options: argparse.Namespace) -> Any:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    sizes = {"dtype": options.dtype, "device": options.device}
    return random_model(options.random, options.layers, **sizes)


def name_of(share: int) -> str:
    return f"{share} % right"


def random_task(number: int, options: argparse.Namespace, num_ids: int) -> Forced:
    """A random prompt and text, and what is predicted of the text for each share."""
    draw = random.Random(number)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(1, num_ids) for _ in range(length)]

    prompt_ids, answer_ids = tokens(_NUM_PROMPT), tokens(options.tokens)
    predictions = {}
    for share in options.shares:
        wrong = iter(tokens(options.tokens))
        predictions[name_of(share)] = [
            token if 100 * draw.random() < share else next(wrong) for token in answer_ids
        ]
    return Forced("text", prompt_ids, answer_ids, predictions)


def tasks_of(edits: Sequence[Edit], tokenizer: Any, *, hide: bool = False) -> list[Forced]:
    """The edits in ids; the wrong prediction of each is the function of three edits before it."""
    prompter = Prompter(tokenizer)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text + "\n", add_special_tokens=False)["input_ids"]
        return found

    def task(edit: Edit, other: Edit) -> Forced:
        order = f"{edit.order} Write the whole function again. Answer with the code alone."
        turn = order if hide else f"{order}\n\n{edit.before}"
        question = Question(0, edit.task, (turn,), f"# {turn}\n\n\n")
        predictions = {RIGHT: ids(edit.before), WRONG: ids(other.before)}
        return Forced(edit.task, prompter.prompt_ids(question, []), ids(edit.after), predictions)

    return [task(edit, edits[index - 3]) for index, edit in enumerate(edits)]


def new_methods(knobs: dict[str, Any], names: Sequence[str]) -> list[Method]:
    """Stock, prompt lookup if named, and selfspec by the other names: of what it is given."""
    ours = {name: SelfSpec(**knobs) for name in names if name != _LOOKUP}
    others = [SelfSpecMethod(n, ours[n]) if n in ours else new_method(n) for n in names]
    return [new_method(STOCK), *others]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, dtype="float32", device="cpu")
    functions = "each is edited three times; default: %(default)s"
    add("--functions", type=int, default=4, metavar="N", help=functions)
    hide = "prompts without the function: only predictions know it"
    add("--hide", action="store_true", help=hide)
    sizes = f"a random model with a running state, of this size: {', '.join(SHAPES)}"
    add("--random", metavar="SHAPE", help=sizes)
    add("--layers", type=int, metavar="N", help="of it, the first N; default: all")
    shares = "of its predictions, how much is right; default: 0 50 80 95"
    add("--shares", type=int, nargs="+", default=[0, 50, 80, 95], metavar="PERCENT", help=shares)
    add("--tokens", type=int, default=96, metavar="N", help="of a random text; default: 96")
    add("--texts", type=int, default=4, metavar="N", help="random ones; default: 4")
    add_drafting(parser)
