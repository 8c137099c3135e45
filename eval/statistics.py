"""From rows to figures: what each method reached, by task and overall. Pure arithmetic.

A question counts once: its turns are added up, and it has a part in a comparison only where
both methods answered all of them. Two speed-ups are given, since they differ: that of all tokens
together, in which long answers weigh more, and those of the questions, each weighing the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from eval.answers import STOCK
from eval.figures import OVERALL, Spread
from eval.rows import Answer, Numbers

__all__ = ["Cost", "Figures", "SpeedUp", "by_task", "costs", "figures", "pooled", "ratios"]

_RESAMPLES = 2000
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Stock's seconds a token over the method's.

    `total` is that of all tokens together, with the interval in which 95 % of resamplings of the
    questions put it; `mean` and `spread` are over questions.
    """

    num_questions: int
    total: float
    low: float
    high: float
    mean: float
    spread: Spread

    def as_json(self) -> dict[str, Any]:
        """Flat, with the spread's names beside the others."""
        values = {**asdict(self), **self.spread._asdict()}
        del values["spread"]
        return values


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One method on some questions. None: nothing to say, or nothing to compare with."""

    num_answers: int
    num_failed: int
    num_new_tokens: int
    tokens_per_step: float | None
    nodes_per_step: float | None
    queries_per_step: float | None
    goodput: float | None  # tokens a second, of the whole calls
    latency_ms: float | None  # what one reader waits for a token
    prefill_ms: float | None
    speed_up: SpeedUp | None
    num_identical: int
    num_near_ties: int
    num_different: int

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "speed_up": self.speed_up and self.speed_up.as_json()}


class Cost(NamedTuple):
    """What a question's answers took, over all turns."""

    seconds: float
    tokens: int

    def __add__(self, other: Any) -> Cost:
        return Cost(self.seconds + other.seconds, self.tokens + other.tokens)


def by_task(answers: Sequence[Answer]) -> dict[str, dict[str, Figures]]:
    """By method, and in it by task, in the order of the rows; `overall` comes last."""
    methods = dict.fromkeys(answer.method for answer in answers)
    tasks = dict.fromkeys(answer.task for answer in answers)
    parts = {task: [a for a in answers if a.task == task] for task in tasks}
    parts[OVERALL] = list(answers)
    return {name: {task: figures(part, name) for task, part in parts.items()} for name in methods}


def figures(answers: Sequence[Answer], method: str) -> Figures:
    """Of one method's answers, beside stock's where there are any."""
    asked = [answer for answer in answers if answer.method == method]
    given = [(answer, answer.numbers) for answer in asked if answer.numbers is not None]
    numbers = [each for _, each in given]
    num_rows = sum(len(answer.questions) for answer, _ in given)
    tokens, steps = _sum(numbers, "num_new_tokens"), _sum(numbers, "num_steps")
    seconds = _sum(numbers, "seconds")
    waited = sum(each.seconds * len(answer.questions) for answer, each in given)
    nodes, queries = _sum(numbers, "num_nodes"), _sum(numbers, "num_branch_queries")
    counted = bool(numbers) and all(each.num_nodes is not None for each in numbers)
    verdicts = Counter(each.same for each in numbers)
    return Figures(
        num_answers=len(given),
        num_failed=len(asked) - len(given),
        num_new_tokens=int(tokens),
        tokens_per_step=_ratio(tokens - num_rows, steps),
        nodes_per_step=_ratio(nodes, steps) if counted else None,
        queries_per_step=_ratio(nodes + queries, steps) if counted else None,
        goodput=_ratio(tokens, seconds),
        latency_ms=_ratio(1000 * waited, tokens),
        prefill_ms=_ratio(1000 * _sum(numbers, "prefill_seconds"), len(given)),
        speed_up=_speed_up(answers, method),
        num_identical=verdicts["identical"],
        num_near_ties=verdicts["near-tie"],
        num_different=verdicts["different"],
    )


def pooled(answers: Iterable[Answer], method: str, name: str) -> Counter[Any]:
    """The sum of a histogram or of counts by name, such as `widths`, over a method's answers."""
    total: Counter[Any] = Counter()
    for answer in answers:
        if answer.method == method and answer.numbers is not None:
            total.update(getattr(answer.numbers, name))
    return total


def costs(answers: Iterable[Answer], method: str) -> dict[Any, Cost]:
    """By question, what a method took for it; what it failed on in any turn is left out."""
    found: dict[Any, Cost] = {}
    failed = set()
    for answer in answers:
        if answer.method != method:
            continue
        if answer.numbers is None:
            failed.add(answer.questions)
            continue
        cost = Cost(answer.numbers.seconds, answer.numbers.num_new_tokens)
        found[answer.questions] = found.get(answer.questions, Cost(0.0, 0)) + cost
    return {key: cost for key, cost in found.items() if key not in failed}


def ratios(slow: Mapping[Any, Cost], fast: Mapping[Any, Cost]) -> SpeedUp | None:
    """How much faster the second is on the questions that both have; by seconds a token."""
    shared = [key for key in slow if key in fast and slow[key].tokens and fast[key].tokens]
    if not shared:
        return None
    left = np.array([slow[key] for key in shared], dtype=np.float64)  # (N, 2)
    right = np.array([fast[key] for key in shared], dtype=np.float64)
    each = (left[:, 0] / left[:, 1]) / (right[:, 0] / right[:, 1])
    low, high = _interval(left, right)
    return SpeedUp(
        num_questions=len(shared),
        total=float(_of_all(left.sum(0), right.sum(0))),
        low=low,
        high=high,
        mean=float(each.mean()),
        spread=Spread.of(each.tolist()),
    )


def _speed_up(answers: Sequence[Answer], method: str) -> SpeedUp | None:
    """None for stock itself."""
    return None if method == STOCK else ratios(costs(answers, STOCK), costs(answers, method))


def _of_all(left: Any, right: Any) -> Any:
    return (left[..., 0] / left[..., 1]) / (right[..., 0] / right[..., 1])


def _interval(left: Any, right: Any) -> tuple[float, float]:
    """The bootstrap's 95 %: the total of questions drawn anew, with replacement."""
    generator = np.random.default_rng(_SEED)
    drawn = generator.integers(len(left), size=(_RESAMPLES, len(left)))
    totals = _of_all(left[drawn].sum(1), right[drawn].sum(1))
    low, high = np.percentile(totals, [2.5, 97.5])
    return float(low), float(high)


def _sum(numbers: Sequence[Numbers], name: str) -> float:
    return sum(getattr(each, name) or 0 for each in numbers)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
