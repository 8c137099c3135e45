"""How much faster one method is than another, question by question and in all. Pure arithmetic.

A question counts once: its turns are added up, and it has a part in a comparison only where
both methods answered all of them. Two speed-ups are given, since they differ: that of all seconds
together, in which long answers weigh more, and those of the questions, each weighing the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from eval.report.rows import Answer, Numbers

_RESAMPLES = 2000
_SEED = 0


class Spread(NamedTuple):
    """Least, lower quartile, median, upper quartile, most."""

    min: float
    q1: float
    median: float
    q3: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value at least.

        >>> Spread.of([4, 1, 2, 3, 5])
        Spread(min=1, q1=2.0, median=3.0, q3=4.0, max=5)
        """
        twice = values if len(values) > 1 else [*values, *values]  # one value is all five
        q1, median, q3 = statistics.quantiles(twice, n=4, method="inclusive")
        return cls(min(values), q1, median, q3, max(values))


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Stock's seconds over the method's. A text of another length counts as if it had stock's.

    `total` is that of all questions' seconds, with the interval in which 95 % of resamplings of
    the questions put it; `mean` and `spread` are over questions.
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


class Cost(NamedTuple):
    """What a question's answers took, over all turns."""

    seconds: float
    tokens: int

    def __add__(self, other: Any) -> Cost:
        return Cost(self.seconds + other.seconds, self.tokens + other.tokens)


Measure = Callable[[Answer, Numbers], Cost]


def whole_cost(answer: Answer, numbers: Numbers) -> Cost:
    """Of the whole call."""
    return Cost(numbers.seconds, numbers.num_new_tokens)


def decoding_cost(answer: Answer, numbers: Numbers) -> Cost:
    """Without the prompt's forward, and the token that it yields for each question."""
    seconds = numbers.seconds - numbers.prefill_seconds
    return Cost(seconds, numbers.num_new_tokens - len(answer.questions))


def prefill_cost(answer: Answer, numbers: Numbers) -> Cost:
    """Up to the end of the prompt's forward, for its one token."""
    return Cost(numbers.prefill_seconds, len(answer.questions))


def costs(answers: Iterable[Answer], method: str, cost: Measure = whole_cost) -> dict[Any, Cost]:
    """By question, what a method took for it; what it failed on in any turn is left out.

    Of several rounds that with the median of the seconds counts, for each turn by itself.
    """
    own = [answer for answer in answers if answer.method == method]
    failed = {answer.questions for answer in own if answer.numbers is None}
    found: dict[Any, Cost] = {}
    for (questions, _), tried in _by_turn(own, cost).items():
        if questions not in failed:
            median = sorted(tried)[(len(tried) - 1) // 2]
            found[questions] = found.get(questions, Cost(0.0, 0)) + median
    return found


def variation(answers: Iterable[Answer], method: str) -> float | None:
    """How far a method's seconds for one and the same turn lie apart in several rounds.

    The median over turns of (most - least) / least; None where nothing was answered twice.
    """
    tried = _by_turn([each for each in answers if each.method == method], whole_cost).values()
    seconds = [[cost.seconds for cost in each] for each in tried if len(each) > 1]
    return statistics.median(max(s) / min(s) - 1 for s in seconds) if seconds else None


def _by_turn(answers: Iterable[Answer], cost: Measure) -> dict[tuple[Any, int], list[Cost]]:
    """By question and turn, what each round took."""
    found: dict[tuple[Any, int], list[Cost]] = {}
    for answer in answers:
        if answer.numbers is not None:
            tried = found.setdefault((answer.questions, answer.turn), [])
            tried.append(cost(answer, answer.numbers))
    return found


def ratios(slow: Mapping[Any, Cost], fast: Mapping[Any, Cost]) -> SpeedUp | None:
    """How much faster the second is on the questions that both have, at the first's lengths."""
    shared = [key for key in slow if key in fast and slow[key].tokens and fast[key].tokens]
    if not shared:
        return None
    left = np.array([slow[key].seconds for key in shared])
    right = np.array([fast[k].seconds * slow[k].tokens / fast[k].tokens for k in shared])
    low, high = _interval(left, right)
    return SpeedUp(
        num_questions=len(shared),
        total=float(left.sum() / right.sum()),
        low=low,
        high=high,
        mean=float((left / right).mean()),
        spread=Spread.of((left / right).tolist()),
    )


def _interval(left: Any, right: Any) -> tuple[float, float]:
    """The bootstrap's 95 %: the total of questions drawn anew, with replacement."""
    generator = np.random.default_rng(_SEED)
    drawn = generator.integers(len(left), size=(_RESAMPLES, len(left)))
    totals = left[drawn].sum(1) / right[drawn].sum(1)
    low, high = np.percentile(totals, [2.5, 97.5])
    return float(low), float(high)
