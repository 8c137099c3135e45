"""Replays a run's texts with no model: what other sources, knobs and budgets make of them.

    python -m eval replay out --max-nodes 8 16
    python -m eval replay out --clock

Drafts for the texts that a run recorded, step by step, and counts what would have been accepted.
The text stands for the model, so tables learn from its tokens alone, and tokens per step come out
lower than with the model: compare them with each other only.

With --clock, a forward takes what a curve says with 8 % of noise, and the measured budget stands
beside fixed widths; --busy plays a machine with other work. Budgets see the noise, and figures
leave it out, since it slows all widths alike. Each cell is the time of plain steps over that of the
method, cold at the first answer, with the mean width of a step in brackets. *worst* is the slowest
answer of all repeats. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.benches.questions import ranks
from eval.options import add_knob, check_at_least, parsed_knobs
from eval.report.rows import read_answers
from eval.report.table import Table
from eval.runs.environment import tell
from eval.runs.simulate import (
    Clock,
    Text,
    recorded_texts,
    replay,
    replays_table,
    simulated,
    vocab_size,
)
from selfspec import GenerationStats, SelfSpec, SpecConfig
from selfspec.cost import Budget, CostCurve, Ledger, MeasuredBudget

FIXED = (2, 4, 8, 16)


Milliseconds = dict[int, float]


class Case(NamedTuple):
    """What forwards cost, in milliseconds by width, and what is believed of it at the start."""

    milliseconds: Milliseconds
    start: Callable[[], CostCurve]

    def clock(self, options: argparse.Namespace, seed: int) -> Clock:
        seconds = {width: ms / 1000 for width, ms in self.milliseconds.items()}
        return Clock(seconds, options.noise, seed, options.busy)


_FLAT: Milliseconds = {1: 4.5, 16: 4.7, 64: 5.4}
_HALF_COPIES: Milliseconds = {1: 159, 2: 159, 4: 177, 8: 265, 16: 432, 64: 1500}
_PACKED: Milliseconds = {1: 52, 2: 64, 4: 76, 8: 82, 16: 111, 64: 290}
_ROW_BY_ROW: Milliseconds = {1: 166, 2: 271, 4: 529, 8: 978, 16: 2272, 64: 9000}


def _timed(milliseconds: Milliseconds) -> CostCurve:
    """What is expected once steps of such costs were seen after a text of another length."""
    return CostCurve({width: cost / 1000 for width, cost in milliseconds.items()}).of_other_length()


CASES = {
    "flat, a CPU's prior": Case(_FLAT, lambda: CostCurve.unknown(0.2)),
    "flat, CUDA's prior": Case(_FLAT, lambda: CostCurve.unknown(0.004)),
    "1B, float16 copies": Case(_HALF_COPIES, lambda: CostCurve.unknown(0.2)),
    "135M, float32, packed": Case(_PACKED, lambda: CostCurve.unknown(0.2)),
    "1B, bfloat16, row by row": Case(_ROW_BY_ROW, lambda: CostCurve.unknown(0.2)),
    "the same, a wrong curve of another length": Case(_ROW_BY_ROW, lambda: _timed(_HALF_COPIES)),
}


class Answer(NamedTuple):
    """What an answer took, and what plain steps would have."""

    seconds: float
    plain_seconds: float
    stats: GenerationStats


class Gained(NamedTuple):
    """What a method gained over several repeats."""

    speed: float
    worst: float
    width: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Gained:
        steps = sum(answer.stats.num_steps for answer in answers)
        return cls(
            sum(a.plain_seconds for a in answers) / sum(a.seconds for a in answers),
            min(a.plain_seconds / a.seconds for a in answers),
            sum(answer.stats.num_nodes for answer in answers) / steps,
        )


def run(options: argparse.Namespace) -> int:
    """Prints a table and the JSON line."""
    check_at_least(options, 1, "repeats", "max_nodes")
    texts = recorded_texts(read_answers(options.folder))
    return _on_clocks(texts, options) if options.clock else _counted(texts, options)


def _counted(texts: Sequence[Text], options: argparse.Namespace) -> int:
    """Tokens per step by width; the exit status is 1 where any is less than --at-least."""
    knobs = parsed_knobs(options.knob)
    configs = [SpecConfig.of(**{"max_nodes": n, **knobs}) for n in options.max_nodes]
    found = {config.max_nodes: simulated(config, texts, options.cache) for config in configs}
    print(replays_table(found).markdown())
    rows = {n: {t: s.tokens_per_step for t, s in tasks.items()} for n, tasks in found.items()}
    tell("replay", options, rows=rows)
    lowest = min(tasks["overall"] for tasks in rows.values())
    return int(options.at_least is not None and lowest < options.at_least)


def _on_clocks(read: Sequence[Text], options: argparse.Namespace) -> int:
    """What budgets make of the texts: the first of each task, then the second."""
    texts = [read[index] for index in sorted(range(len(read)), key=ranks(read).__getitem__)]
    cases = {name: case for name, case in CASES.items() if (options.case or "") in name}
    gained: dict[str, Any] = {}
    for number, length in options.answers:
        cut = [text._replace(output_ids=text.output_ids[:length]) for text in texts[:number]]
        found = {name: compared(cut, case, options) for name, case in cases.items()}
        title = f"{number} answers of {length} tokens"
        print(_table(title, found).markdown() + "\n", flush=True)
        gained[title] = {
            name: {method: each._asdict() for method, each in row.items()}
            for name, row in found.items()
        }
    return tell("replay", options, answers=gained)


def compared(texts: Sequence[Text], case: Case, options: Any) -> dict[str, Gained]:
    """The measured budget, and fixed widths beside it, by the name of the method."""
    knobs = parsed_knobs(options.knob)

    def gained(config: SpecConfig, budgets: Callable[[], Callable[[], Budget]]) -> Gained:
        answers = []
        for seed in range(options.repeats):
            answers += answered(texts, config, case.clock(options, seed), budgets())
        return Gained.of(answers)

    def measured() -> Callable[[], Budget]:
        curve, ledger = case.start(), Ledger()
        return lambda: MeasuredBudget(curve, ledger=ledger)

    found = {"measured": gained(SpecConfig.of(**knobs), measured)}
    for width in FIXED:
        config = SpecConfig.of(**{**knobs, "max_nodes": width})
        found[str(width)] = gained(config, lambda: Budget)
    return found


def answered(
    texts: Sequence[Text], config: SpecConfig, clock: Clock, new_budget: Callable[[], Budget]
) -> list[Answer]:
    """All texts in turn, by one `SelfSpec` that knows nothing at the first one."""
    memory, answers = SelfSpec(config).learned(vocab_size(texts)), []
    for text in texts:
        start = clock.quiet
        stats = replay(text, memory, config, new_budget(), clock)
        plain_seconds = (len(text.output_ids) - 1) * clock.plain
        answers.append(Answer(clock.quiet - start, plain_seconds, stats))
    return answers


def _table(title: str, found: dict[str, dict[str, Gained]]) -> Table:
    head = ["what forwards cost", "measured (width), worst", *map(str, FIXED), "of the best"]
    rows = []
    for name, row in found.items():
        ours, others = row["measured"], [row[str(width)].speed for width in FIXED]
        cell = f"{ours.speed:.2f} ({ours.width:.1f}), {ours.worst:.2f}"
        share = ours.speed / max(1.0, *others)
        rows.append([name, cell, *(f"{speed:.2f}" for speed in others), f"{share:.3f}"])
    return Table(title, head, rows, "Plain steps' time over the method's, on a simulated clock.")


def _asked(text: str) -> tuple[int, int]:
    number, length = map(int, text.split("x"))
    return number, length


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="--output of a run")
    add("--max-nodes", type=int, nargs="+", default=[8, 16, 32, 64], metavar="N")
    add("--cache", metavar="CACHE", help="start with this cache or Hub id")
    add("--at-least", type=float, metavar="X", help="exit status 1 where any width yields less")
    add("--clock", action="store_true", help="the measured budget beside fixed widths, in seconds")
    add("--answers", nargs="+", type=_asked, default=[(4, 64), (8, 128)], metavar="NxTOKENS")
    add("--noise", type=float, default=0.08, help="of a forward's time; default: %(default)s")
    busy = "forwards alone or many in a row take longer, as beside other work; with --noise 0.3"
    add("--busy", action="store_true", help=busy)
    add("--repeats", type=int, default=3, metavar="N", help="with other noise; default: 3")
    add("--case", help="only what forwards cost that has this in its name")
    add_knob(parser)
