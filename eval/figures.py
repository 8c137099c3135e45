"""From rows to figures: for each method, by task and overall. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eval.answers import STOCK, Answer, Row
from selfspec.cost import CostCurve
from selfspec.records import GenerationStats

__all__ = ["OVERALL", "Bound", "Figures", "SpeedUp", "Spread", "bound", "by_task", "stage_seconds"]

OVERALL = "overall"
STAGES = ("draft", "layout", "forward", "verify", "commit", "learn")
_NOT_DECODING = {"prefill", "teach", "plain", "profile"}  # of the clocks in GenerationStats

Pairs = list[tuple[Answer, Answer]]  # stock's, the method's


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


class SpeedUp(NamedTuple):
    """Stock's seconds a token over the method's: of all tokens together, and prompt by prompt."""

    total: float
    spread: Spread


class Figures(NamedTuple):
    """One method on some prompts; those that it or stock failed on have no part in a speed-up."""

    num_prompts: int  # answered
    num_failed: int
    num_same: int
    num_new_tokens: int
    ms_per_token: float
    prefill_ms: float  # a prompt
    decode_ms_per_token: float
    speed_up: SpeedUp | None
    decode_speed_up: SpeedUp | None
    stats: GenerationStats | None

    @classmethod
    def of(cls, rows: Sequence[Row], name: str) -> Figures:
        """Of the answers that a method gave."""
        asked = [row.answers[name] for row in rows if name in row.answers]
        given = [answer for answer in asked if answer.error is None]
        pairs = _pairs(rows, name)
        decoded = [pair for pair in pairs if min(answer.num_decoded for answer in pair)]
        return cls(
            num_prompts=len(given),
            num_failed=len(asked) - len(given),
            num_same=sum(answer.same is True for answer in given),
            num_new_tokens=sum(answer.num_new_tokens for answer in given),
            ms_per_token=1000 * _rate(given, *_WHOLE),
            prefill_ms=1000 * sum(a.prefill_seconds for a in given) / max(len(given), 1),
            decode_ms_per_token=1000 * _rate(given, *_DECODING),
            speed_up=_speed_up(pairs, *_WHOLE),
            decode_speed_up=_speed_up(decoded, *_DECODING),
            stats=_summed([answer.stats for answer in given]),
        )


_Measure = Callable[[Answer], float]
_WHOLE: tuple[_Measure, _Measure] = (lambda a: a.seconds, lambda a: a.num_new_tokens)
_DECODING: tuple[_Measure, _Measure] = (lambda a: a.decode_seconds, lambda a: a.num_decoded)


def by_task(rows: Sequence[Row], name: str) -> dict[str, Figures]:
    """A method's figures for each task, in the order of the rows, and `overall`."""
    tasks = dict.fromkeys(row.task for row in rows)
    parts = {task: Figures.of([row for row in rows if row.task == task], name) for task in tasks}
    return {**parts, OVERALL: Figures.of(rows, name)}


class Bound(NamedTuple):
    """How much faster than plain decoding drafts can be here, and at which width."""

    speed_up: float
    width: int


def bound(curve: CostCurve, max_width: int) -> Bound:
    """What a perfect drafter reaches at this T(width): max over w of w · T(1) / T(w).

    Each of its forwards verifies a chain of w - 1 drafts, all of them right, and yields w tokens.
    Of decoding alone: the prompt's forward costs everybody the same.

    >>> bound(CostCurve({1: 0.010, 4: 0.010, 8: 0.040}), 8)
    Bound(speed_up=4.0, width=4)
    """
    times = curve.table(max_width)
    bounds = [Bound(w * times[1] / times[w], w) for w in range(1, max_width + 1)]
    return max(bounds, key=lambda each: each.speed_up)  # the narrowest of equal ones


def stage_seconds(stats: GenerationStats) -> dict[str, float]:
    """The seconds of each stage of a step, in order; what belongs to no step is left out."""
    others = [name for name in stats.seconds if name not in (*STAGES, *_NOT_DECODING)]
    return {name: float(stats.seconds[name]) for name in (*STAGES, *others)}


def _pairs(rows: Sequence[Row], name: str) -> Pairs:
    """None for stock itself, which has no speed-up."""
    if name == STOCK:
        return []
    both = [(row.answers.get(STOCK), row.answers.get(name)) for row in rows]
    return [
        (stock, ours)
        for stock, ours in both
        if stock is not None and ours is not None and stock.error is None and ours.error is None
    ]


def _rate(answers: Sequence[Answer], seconds: _Measure, tokens: _Measure) -> float:
    return sum(map(seconds, answers)) / max(sum(map(tokens, answers)), 1)


def _speed_up(pairs: Pairs, seconds: _Measure, tokens: _Measure) -> SpeedUp | None:
    """By seconds a token, since texts that differ may differ in length."""
    if not pairs:
        return None

    def ratio(*pairs: tuple[Answer, Answer]) -> float:
        stock, ours = (_rate(side, seconds, tokens) for side in zip(*pairs, strict=True))
        return stock / ours

    return SpeedUp(ratio(*pairs), Spread.of([ratio(pair) for pair in pairs]))


def _summed(all_stats: Sequence[GenerationStats | None]) -> GenerationStats | None:
    counted = [stats for stats in all_stats if stats is not None]
    return sum(counted, GenerationStats()) if counted else None
