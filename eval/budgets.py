"""Budgets on simulated clocks: what the measured width gains, beside fixed ones, in seconds.

    python -m eval budgets answers.jsonl --record --model PATH --questions question.jsonl
    python -m eval budgets answers.jsonl

The first command answers questions with wide trees and keeps what the model said at every node. The
second decodes them again from that file. Drafts, calibration and budgets are real; a forward takes
what a curve says with 8 % of noise. Each cell is the time of plain steps over that of the method,
cold at the first answer, with the mean width of a step in brackets. *worst* is the slowest answer
of all repeats. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.benches.prompts import load_questions
from eval.benches.questions import ranks
from eval.errors import EvalError
from eval.models.loading import load_asked, load_tokenizer
from eval.options import add_knob, add_questions, add_required_model, parsed_knobs
from eval.report.table import Table
from eval.runs.clocked import Answer, Host, Machine, answered
from eval.runs.environment import told
from eval.runs.recorded import RecordedText, read_texts, record, write_texts
from selfspec import SelfSpec, SpecConfig, attach
from selfspec.cost import Budget, CostCurve, FixedBudget, Ledger, MeasuredBudget

FIXED = (2, 4, 8, 16)


class Case(NamedTuple):
    """What forwards cost, in milliseconds by width, and what is believed of it at the start."""

    milliseconds: dict[int, float]
    start: Callable[[], CostCurve]


_FLAT = {1: 4.5, 16: 4.7, 64: 5.4}
_HALF_COPIES = {1: 159, 2: 159, 4: 177, 8: 265, 16: 432, 64: 1500}
_PACKED = {1: 52, 2: 64, 4: 76, 8: 82, 16: 111, 64: 290}
_ROW_BY_ROW = {1: 166, 2: 271, 4: 529, 8: 978, 16: 2272, 64: 9000}


def _timed(milliseconds: dict[int, float]) -> CostCurve:
    """A curve that an earlier process learned from steps of such costs."""
    return CostCurve({width: cost / 1000 for width, cost in milliseconds.items()}).reopened()


CASES = {
    "flat, a CPU's prior": Case(_FLAT, lambda: CostCurve.unknown(0.2)),
    "flat, CUDA's prior": Case(_FLAT, lambda: CostCurve.unknown(0.01)),
    "1B, float16 copies": Case(_HALF_COPIES, lambda: CostCurve.unknown(0.2)),
    "135M, float32, packed": Case(_PACKED, lambda: CostCurve.unknown(0.2)),
    "1B, bfloat16, row by row": Case(_ROW_BY_ROW, lambda: CostCurve.unknown(0.2)),
    "the same, a wrong curve on disk": Case(_ROW_BY_ROW, lambda: _timed(_HALF_COPIES)),
}


class Gained(NamedTuple):
    """What a method gained over several repeats."""

    speed: float
    worst: float
    width: float
    tokens_per_step: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Gained:
        steps = sum(answer.stats.num_steps for answer in answers)
        return cls(
            sum(a.plain_seconds for a in answers) / sum(a.seconds for a in answers),
            min(a.plain_seconds / a.seconds for a in answers),
            sum(answer.stats.num_nodes for answer in answers) / steps,
            sum(a.stats.tokens_per_step * a.stats.num_steps for a in answers) / steps,
        )

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in self._asdict().items()}


def run(options: argparse.Namespace) -> int:
    """Records answers, or prints a table of what budgets make of them."""
    return _record(options) if options.record else _compare(options)


def _record(options: argparse.Namespace) -> int:
    if options.model is None:
        raise EvalError("--record needs --model (got none)")
    prompts = load_questions(options, load_tokenizer(options.model))
    asked = {"temperature": options.temperature, "max_nodes": options.record_nodes}
    texts = record(
        attach(load_asked(options)), prompts, max_new_tokens=options.record_tokens, **asked
    )
    number = write_texts(options.texts, texts)
    print(json.dumps(told("budgets", options, recorded=number)))
    return 0


def _compare(options: argparse.Namespace) -> int:
    read = read_texts(options.texts)
    # The first of each task, then the second.
    texts = [read[index] for index in sorted(range(len(read)), key=ranks(read).__getitem__)]
    knobs = parsed_knobs(options.knob)
    gained: dict[str, Any] = {}
    for number, length in options.answers:
        found = {}
        for name, case in CASES.items():
            if options.case and options.case not in name:
                continue
            found[name] = compared(texts[:number], length, case, options, knobs)
        title = f"{number} answers of {length} tokens"
        print(_table(title, found).markdown() + "\n", flush=True)
        gained[title] = {
            name: {method: each.rounded() for method, each in row.items()}
            for name, row in found.items()
        }
    print(json.dumps(told("budgets", options, answers=gained)))
    return 0


def compared(
    texts: Sequence[RecordedText], length: int, case: Case, options: Any, knobs: dict[str, Any]
) -> dict[str, Gained]:
    """The measured budget, and fixed widths beside it, by the name of the method."""

    def gained(config: SpecConfig, budgets: Callable[[], Callable[[], Budget]]) -> Gained:
        answers = []
        for seed in range(options.repeats):
            machine = machine_of(case, options.noise, seed)
            answers += decoded(texts, length, config, machine, budgets())
        return Gained.of(answers)

    def measured() -> Callable[[], Budget]:
        curve, ledger = case.start(), Ledger()
        return lambda: MeasuredBudget(curve, ledger=ledger)

    found = {"measured": gained(SpecConfig.of(**knobs), measured)}
    for width in FIXED:
        config = SpecConfig.of(**{**knobs, "max_nodes": width})
        found[str(width)] = gained(config, lambda: FixedBudget)
    return found


def machine_of(case: Case, noise: float, seed: int) -> Machine:
    seconds = {width: cost / 1000 for width, cost in case.milliseconds.items()}
    return Machine(seconds, Host(), noise, seed)


def decoded(
    texts: Sequence[RecordedText],
    length: int,
    config: SpecConfig,
    machine: Machine,
    new_budget: Callable[[], Budget],
) -> list[Answer]:
    """All texts in turn, by one `SelfSpec` that knows nothing at the first one."""
    spec = SelfSpec(config)
    memory = spec.memory(max(text.vocab_size for text in texts))
    return [answered(text, memory, config, machine, new_budget, length) for text in texts]


def _table(title: str, found: dict[str, dict[str, Gained]]) -> Table:
    head = ["what forwards cost", "measured (width), worst", *map(str, FIXED), "of the best"]
    rows = []
    for name, row in found.items():
        ours, others = row["measured"], [row[str(width)].speed for width in FIXED]
        cell = f"{ours.speed:.2f} ({ours.width:.1f}), {ours.worst:.2f}"
        share = ours.speed / max(1.0, *others)
        rows.append([name, cell, *(f"{speed:.2f}" for speed in others), f"{share:.3f}"])
    return Table(title, head, rows)


def _asked(text: str) -> tuple[int, int]:
    number, length = map(int, text.split("x"))
    return number, length


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("texts", type=Path, metavar="FILE", help="recorded answers")
    add("--answers", nargs="+", type=_asked, default=[(4, 64), (8, 128)], metavar="NxTOKENS")
    add("--noise", type=float, default=0.08, help="of a forward's time; default: %(default)s")
    add("--repeats", type=int, default=3, metavar="N", help="with other noise; default: 3")
    add("--case", help="only what forwards cost that has this in its name")
    add_knob(parser)
    group = parser.add_argument_group("recording")
    group.add_argument("--record", action="store_true", help="answer questions into FILE")
    add_required_model(group)
    add_questions(group, limit="the first N prompts")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    group.add_argument("--record-tokens", type=int, default=128, metavar="N")
    group.add_argument("--record-nodes", type=int, default=32, metavar="N")
    for action in parser._actions:
        action.required = action.dest == "texts"
