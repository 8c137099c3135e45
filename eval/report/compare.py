"""Two runs side by side: the same questions and methods, before and after a change.

Only questions that both have count, and of each a method's own seconds a token: what the machine
did between the two runs is in the ratio, so look at stock's own line first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.errors import EvalError
from eval.report.rows import Answer, Record
from eval.report.speed_up import costs, ratios
from eval.report.statistics import OVERALL, figures
from eval.report.table import Table

_NONE = "–"


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
    left, right = ([record.answers[key] for key in both] for record in (a, b))
    tasks = [*dict.fromkeys(answer.task for answer in left), OVERALL]
    methods = dict.fromkeys(answer.method for answer in left)
    head = [
        "method",
        "task",
        "questions",
        "tokens per step",
        "speed-up",
        "B is faster",
        "quartiles",
    ]
    rows = [
        _row(name, task, _of(left, task), _of(right, task)) for name in methods for task in tasks
    ]
    note = (
        "A / B where there are two. B is faster: A's seconds over B's for texts of A's length, "
        "of all questions together, then of single ones; same: equal texts of all answers."
    )
    return Table("A and B", [*head, "same"], rows, note)


def _of(answers: Sequence[Answer], task: str) -> list[Answer]:
    return [answer for answer in answers if task in (OVERALL, answer.task)]


def _row(name: str, task: str, a: Sequence[Answer], b: Sequence[Answer]) -> list[str]:
    both = [figures(answers, name) for answers in (a, b)]
    faster = ratios(costs(a, name), costs(b, name))
    return [
        name,
        task,
        str(faster.num_questions) if faster else "0",
        _pair([each.tokens_per_step for each in both]),
        _pair([each.speed_up.total if each.speed_up else None for each in both], "x"),
        f"{faster.total:.2f}x" if faster else _NONE,
        f"{faster.spread.q1:.2f} to {faster.spread.q3:.2f}" if faster else _NONE,
        _same_texts(name, a, b),
    ]


def _pair(values: Sequence[float | None], unit: str = "") -> str:
    return " / ".join(_NONE if value is None else f"{value:.2f}{unit}" for value in values)


def _same_texts(name: str, a: Sequence[Answer], b: Sequence[Answer]) -> str:
    pairs = [
        (left.numbers.output_sha256, right.numbers.output_sha256)
        for left, right in zip(a, b, strict=True)
        if left.method == name and left.numbers is not None and right.numbers is not None
    ]
    return f"{sum(left == right for left, right in pairs)} of {len(pairs)}"
