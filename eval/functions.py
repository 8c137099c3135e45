"""How many functions of selfspec a call goes through: to its first token, and in a step.

    python -m eval functions --model PATH

What somebody reads who follows a token through the code: each function counts once, however often
it is entered. Lambdas and comprehensions count as part of the function that they are written in.
The third call of a `SelfSpec` is counted, in which nothing is tried or loaded any more. How deep
they are is how many of them wait for each other, those of other libraries left out. Any machine
counts the same. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import selfspec
from eval.models.loading import load_asked
from eval.options import add_model, check_at_least
from eval.report.table import Table
from eval.runs.environment import tell, where

_OURS = str(Path(selfspec.__file__).parent)
_PROMPT_TOKENS = 32
_COLUMNS = {"part of a warm call": "{part}", "functions": "{functions}", "deep": "{deep}"}


class Functions:
    """Those of selfspec that were entered since the last `part`, and how deep they were."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()
        self.deepest = 0
        self._depth = 0

    def part(self) -> tuple[set[CodeType], int]:
        """What was counted, after which it begins anew."""
        counted = self.entered, self.deepest
        self.entered, self.deepest = set(), self._depth
        return counted

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS) or code.co_name.startswith("<"):
            return
        if event == "call":
            self.entered.add(code)
            self._depth += 1
            self.deepest = max(self.deepest, self._depth)
        elif event == "return":
            self._depth -= 1


class _Parts:
    """Ends a part at the first token, which a streamer gets, and at the end of each step."""

    def __init__(self, functions: Functions) -> None:
        self.first: tuple[set[CodeType], int] | None = None
        self.steps: list[tuple[set[CodeType], int]] = []
        self._functions = functions
        self._num_put = 0

    def put(self, _value: torch.Tensor) -> None:
        self._num_put += 1
        if self._num_put == 2:  # The prompt comes before it.
            self.first = self._functions.part()

    def end(self) -> None:
        """Does nothing: the last step was the last part."""

    def on_step(self, _record: selfspec.StepRecord) -> None:
        self.steps.append(self._functions.part())


def run(options: argparse.Namespace) -> int:
    """Counts a call, and prints a table and the JSON line."""
    check_at_least(options, 4, "max_new_tokens")
    model = load_asked(options)
    rows = counted(model, options.max_new_tokens)
    title = "Functions of selfspec that are entered"
    print(Table.of(title, _COLUMNS, rows).markdown())
    if options.names:
        print("\n".join(name for row in rows for name in [f"\n{row['part']}:", *row["names"]]))
    figures = [{name: row[name] for name in ("part", "functions", "deep")} for row in rows]
    return tell("functions", options, **where(model), rows=figures)


def counted(model: Any, max_new_tokens: int) -> list[dict[str, Any]]:
    """The parts of a call: to the first token, the median step, and all steps."""
    spec = selfspec.SelfSpec()
    selfspec.attach(model, pack=True)
    vocab_size = model.config.get_text_config().vocab_size
    dice, options = torch.Generator().manual_seed(0), {"do_sample": False, "assistant": spec}

    def answer(**more: Any) -> None:
        """One call, to a prompt that says something twice."""
        ids = torch.randint(3, vocab_size, (1, _PROMPT_TOKENS // 2), generator=dice).repeat(1, 2)
        ids = ids.to(model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        model.generate(**inputs, max_new_tokens=max_new_tokens, **options, **more)

    for _ in range(2):
        answer()
    functions = Functions()
    parts = _Parts(functions)
    with spec.listening(parts.on_step), functions.counting():
        answer(streamer=parts)
    assert parts.first is not None
    # The first record is that of the first token, and the next step also learns from the prompt.
    steps = sorted(parts.steps[2:], key=lambda step: len(step[0]))
    in_all = set[CodeType]().union(*(entered for entered, _ in steps))
    return [
        _row("to the first token", *parts.first),
        _row("in the median step", *steps[len(steps) // 2]),
        _row("in all steps", in_all, max(deep for _, deep in steps)),
    ]


def _row(part: str, entered: set[CodeType], deep: int) -> dict[str, Any]:
    names = sorted(map(_place, entered))
    return {"part": part, "functions": len(entered), "deep": deep, "names": names}


def _place(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(_OURS)[1:]}:{code.co_firstlineno} {code.co_name}"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, dtype="float32", device="cpu")
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=32, metavar="N", help="default: %(default)s")
    add("--names", action="store_true", help="name all functions, with their places")
