"""Two runs side by side: the same questions and methods, before and after a change.

Only questions that both have count, and of each a method's own seconds a token: what the machine
did between the two runs is in the ratio, so look at stock's own line first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from eval.errors import EvalError
from eval.report.rows import Record, frame_of
from eval.report.statistics import (
    OVERALL,
    costs,
    figures,
    is_busy,
    processor_share,
    ratios,
    without_times,
)
from eval.report.table import NONE, Table


def compared(a: Record, b: Record) -> str:
    """Markdown: what differs in the settings, then a table by method and task."""
    _check_comparable(a, b)
    lines = [f"- {name}: {was!r} / {now!r}" for name, was, now in differences(a, b)]
    settings = "\n".join(["# A / B", "", *(lines or ["- asked and measured alike"])])
    return f"{settings}\n\n{_table(a, b).markdown()}\n"


def differences(a: Record, b: Record) -> list[tuple[str, Any, Any]]:
    """(name, A's, B's) of whatever the two were asked or measured with."""
    found = []
    for part in ("settings", "environment"):
        left, right = a.runs[0][part], b.runs[0][part]
        names = dict.fromkeys([*left, *right])
        found += [(n, left.get(n), right.get(n)) for n in names if left.get(n) != right.get(n)]
    return found


def _check_comparable(a: Record, b: Record) -> None:
    hashes = [record.runs[0]["settings"]["questions_sha256"] for record in (a, b)]
    if hashes[0] != hashes[1]:
        raise EvalError(
            "two runs must have the same bench to be compared (got "
            f"{a.runs[0]['settings']['bench']!r} and {b.runs[0]['settings']['bench']!r} of other "
            "questions); compare runs of one and the same file"
        )


def _table(a: Record, b: Record) -> Table:
    both = [key for key in a.answers if key in b.answers]
    if not both:
        raise EvalError("two runs must share a question and a method to be compared (got none)")
    left, right = (frame_of(record.answers[key] for key in both) for record in (a, b))
    rows = [
        _row(name, task, _of(left, task), _of(right, task))
        for name in left.method.unique()
        for task in [*left.task.unique(), OVERALL]
    ]
    head = ["method", "task", "questions", "tokens per step", "speed-up"]
    note = (
        "A / B where there are two. B is faster: A's seconds over B's for texts of A's length, "
        "of all questions together, then of single ones; same: equal texts of all answers. Times "
        "of a busy machine are left out."
    )
    return Table("A and B", [*head, "B is faster", "quartiles", "same"], rows, note)


def _of(answers: pd.DataFrame, task: str) -> pd.DataFrame:
    return answers if task == OVERALL else answers[answers.task == task]


def _row(name: str, task: str, a: pd.DataFrame, b: pd.DataFrame) -> list[str]:
    both, faster = [figures(answers, name) for answers in (a, b)], None
    if any(is_busy(processor_share(answers)) for answers in (a, b)):
        both = list(map(without_times, both))
    else:
        faster = ratios(costs(a, name), costs(b, name))
    return [
        name,
        task,
        str(faster["num_questions"]) if faster else "0",
        _pair([run["tokens_per_step"] for run in both]),
        _pair(
            [run["speed_up"] and run["speed_up"]["total"] for run in both],
            "x",
        ),
        f"{faster['total']:.2f}x" if faster else NONE,
        f"{faster['q1']:.2f} to {faster['q3']:.2f}" if faster else NONE,
        _same_texts(name, a, b),
    ]


def _pair(values: Sequence[float | None], unit: str = "") -> str:
    return " / ".join(NONE if value is None else f"{value:.2f}{unit}" for value in values)


def _same_texts(name: str, a: pd.DataFrame, b: pd.DataFrame) -> str:
    left, right = (
        each[each.method == name].output_sha256.reset_index(drop=True) for each in (a, b)
    )
    given = left.notna() & right.notna()
    return f"{(left == right)[given].sum()} of {given.sum()}"
