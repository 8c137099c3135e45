"""From rows to figures: what each method reached, by task and overall. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval.methods.names import FORWARD_ONLY, STOCK
from eval.report.rows import Answer, Numbers
from eval.report.speed_up import (
    Measure,
    SpeedUp,
    costs,
    decoding_cost,
    prefill_cost,
    ratios,
    whole_cost,
)
from selfspec.stats import ONCE_A_CALL

OVERALL = "overall"
STAGES = ("draft", "layout", "forward", "verify", "commit", "learn")  # of a step, in order

Given = Sequence[tuple[Answer, Numbers]]  # answers that there are


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One method on some questions. None: nothing to say, or nothing to compare with.

    What is called decoding leaves the prompts' forwards out, and the tokens that they yield.
    """

    num_answers: int
    num_failed: int
    num_new_tokens: int
    tokens_per_step: float | None
    nodes_per_step: float | None
    queries_per_step: float | None
    goodput: float | None  # tokens a second, of the whole calls
    ms_per_token: float | None  # what one reader waits for a token
    prefill_ms: float | None  # a call
    decode_ms_per_token: float | None
    speed_up: SpeedUp | None  # of the whole calls
    prefill_speed_up: SpeedUp | None
    decode_speed_up: SpeedUp | None
    drafting_speed_up: SpeedUp | None  # over selfspec's own forward without drafts
    speed_up_by_round: list[float]  # totals of whole calls; empty where there is one round
    num_same: int
    num_near_ties: int
    num_different: int
    stage_ms: dict[str, float]  # a step
    call_ms: dict[str, float]  # what is spent once a call
    overhead: float | None  # share of the steps' time that is not the forward
    table_bytes: int | None  # the most that LUTs took; None where nobody has any
    disabled_reason: str | None
    forwards: dict[str, int]  # how they were run at the end of answers -> number of answers
    packed_bytes: int  # the most that copies of weights took

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        kinds = ("speed_up", "prefill_speed_up", "decode_speed_up", "drafting_speed_up")
        given = {name: getattr(self, name) for name in kinds}
        flat = {name: value and value.as_json() for name, value in given.items()}
        return {**asdict(self), **flat}


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
    verdicts = Counter(each.same for each in numbers)
    tables = [each.table_bytes for each in numbers if each.table_bytes is not None]
    reasons = [each.disabled_reason for each in numbers if each.disabled_reason]
    return Figures(
        num_answers=len(given),
        num_failed=len(asked) - len(given),
        num_same=verdicts["identical"],
        num_near_ties=verdicts["near-tie"],
        num_different=verdicts["different"],
        speed_up=_speed_up(answers, method, whole_cost),
        prefill_speed_up=_speed_up(answers, method, prefill_cost),
        decode_speed_up=_speed_up(answers, method, decoding_cost),
        drafting_speed_up=_drafting_speed_up(answers, method, numbers),
        speed_up_by_round=_by_round(answers, method),
        table_bytes=max(tables, default=None),
        disabled_reason=reasons[-1] if reasons else None,
        forwards=dict(Counter(each.forward for each in numbers if each.forward)),
        packed_bytes=max((each.packed_bytes or 0 for each in numbers), default=0),
        **_rates(given),
        **_per_step(given),
        **_stages(numbers),
    )


def _rates(given: Given) -> dict[str, Any]:
    numbers = [each for _, each in given]
    tokens, seconds = _sum(numbers, "num_new_tokens"), _sum(numbers, "seconds")
    waited = sum(each.seconds * len(answer.questions) for answer, each in given)
    decoding = [(decoding_cost(*each), len(each[0].questions)) for each in given]
    return {
        "num_new_tokens": int(tokens),
        "goodput": _ratio(tokens, seconds),
        "ms_per_token": _ratio(1000 * waited, tokens),
        "prefill_ms": _ratio(1000 * _sum(numbers, "prefill_seconds"), len(given)),
        "decode_ms_per_token": _ratio(
            1000 * sum(cost.seconds * rows for cost, rows in decoding),
            sum(cost.tokens for cost, _ in decoding),
        ),
    }


def _per_step(given: Given) -> dict[str, float | None]:
    numbers = [each for _, each in given]
    steps, nodes = _sum(numbers, "num_steps"), _sum(numbers, "num_nodes")
    queries = nodes + _sum(numbers, "num_branch_queries")
    counted = bool(numbers) and all(each.num_nodes is not None for each in numbers)
    decoded = sum(decoding_cost(*each).tokens for each in given)
    return {
        "tokens_per_step": _ratio(decoded, steps),
        "nodes_per_step": _ratio(nodes, steps) if counted else None,
        "queries_per_step": _ratio(queries, steps) if counted else None,
    }


def _stages(numbers: Sequence[Numbers]) -> dict[str, Any]:
    """Where time goes, by those who say so; a stage that nobody knows yet comes behind."""
    spent: Counter[str] = Counter()
    for each in numbers:
        spent.update(each.stage_seconds)
    names = [name for name in (*STAGES, *spent) if name in spent and name not in ONCE_A_CALL]
    stages = {name: spent[name] for name in names}
    steps = max(_sum(numbers, "num_steps"), 1)
    total = sum(stages.values())
    return {
        "stage_ms": {name: 1000 * seconds / steps for name, seconds in stages.items()},
        "call_ms": {n: 1000 * spent[n] / len(numbers) for n in ONCE_A_CALL if n in spent},
        "overhead": 1 - spent["forward"] / total if total else None,
    }


def pooled(answers: Iterable[Answer], method: str, name: str) -> Counter[Any]:
    """The sum of a histogram or of counts by name, such as `widths`, over a method's answers."""
    total: Counter[Any] = Counter()
    for answer in answers:
        if answer.method == method and answer.numbers is not None:
            total.update(getattr(answer.numbers, name))
    return total


def _speed_up(answers: Sequence[Answer], method: str, cost: Measure) -> SpeedUp | None:
    """None for stock itself."""
    sides = (costs(answers, name, cost) for name in (STOCK, method))
    return None if method == STOCK else ratios(*sides)


def _by_round(answers: Sequence[Answer], method: str) -> list[float]:
    rounds = sorted({answer.round for answer in answers})
    if len(rounds) == 1:
        return []
    parts = ([answer for answer in answers if answer.round == number] for number in rounds)
    found = (_speed_up(part, method, whole_cost) for part in parts)
    return [each.total for each in found if each is not None]


def _drafting_speed_up(
    answers: Sequence[Answer], method: str, numbers: Sequence[Numbers]
) -> SpeedUp | None:
    """Of a method of ours whose forward is that of `FORWARD_ONLY`; None for all others."""
    if method == FORWARD_ONLY or not any(each.num_nodes is not None for each in numbers):
        return None
    return ratios(costs(answers, FORWARD_ONLY), costs(answers, method))


def _sum(numbers: Sequence[Numbers], name: str) -> float:
    return sum(getattr(each, name) or 0 for each in numbers)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
