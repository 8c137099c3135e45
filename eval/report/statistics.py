"""From answers to figures: what each method reached, by task and overall. Pure arithmetic.

A question counts once: its turns are added up, and it has a part in a comparison only where both
methods answered all of them. Two speed-ups are given, since they differ: that of all seconds
together, in which long answers weigh more, and those of the questions, each weighing the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from eval.methods.names import FORWARD_ONLY, STOCK
from eval.runs.processor import LEAST_SHARE

OVERALL = "overall"
STAGES = ("draft", "layout", "forward", "verify", "commit", "learn")  # of a step, in order
_ONCE_A_CALL = ("prepare", "prefill", "plain")  # clocks of what belongs to no step
_OF_TIMES = (
    *("speed_up", "prefill_speed_up", "decode_speed_up", "drafting_speed_up", "overhead"),
    *("goodput", "ms_per_token", "prefill_ms", "decode_ms_per_token"),
)
_RESAMPLES = 2000
_SEED = 0

Figures = dict[str, Any]
Measure = Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]]  # (seconds, tokens) of answers


def whole(answers: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Of the whole calls."""
    return answers.seconds, answers.num_new_tokens


def decoding(answers: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Without the prompts' forwards, and the token that each yields; nothing if not told apart."""
    is_told = answers.prefill_seconds.notna()
    return answers.seconds - answers.prefill_seconds, (answers.num_new_tokens - 1).where(is_told, 0)


def prefill(answers: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Up to the end of the prompts' forwards, for their one token."""
    return answers.prefill_seconds, answers.prefill_seconds.notna().astype(int)


def by_task(answers: pd.DataFrame) -> dict[str, dict[str, Figures]]:
    """By method, and in it by task, in the order of the rows; `overall` comes last."""
    parts = {task: answers[answers.task == task] for task in answers.task.unique()}
    parts[OVERALL] = answers
    methods = answers.method.unique()
    return {name: {task: figures(part, name) for task, part in parts.items()} for name in methods}


def figures(answers: pd.DataFrame, method: str) -> Figures:
    """Of one method's answers, beside stock's where there are any; `eval.report.summary` lists
    them. None: nothing to say, or nothing to compare with.
    """
    asked = answers[answers.method == method]
    given = asked[asked.seconds.notna()]
    verdicts, forwards = given.same.value_counts(), given.forward.dropna()
    reasons = given.disabled_reason.dropna()
    return {
        "num_answers": len(given),
        "num_failed": len(asked) - len(given),
        **_rates(given),
        **{name: _speed_up(answers, method, of) for name, of in _SPEED_UPS.items()},
        "drafting_speed_up": _drafting_speed_up(answers, method, given),
        "speed_up_by_round": _by_round(answers, method),
        "num_same": int(verdicts.get("identical", 0)),
        "num_near_ties": int(verdicts.get("near-tie", 0)),
        "num_different": int(verdicts.get("different", 0)),
        "largest_gap_ulps": _number(given.gap_ulps.max()),
        **_stages(given),
        "table_bytes": _number(given.table_bytes.max()),
        "disabled_reason": None if reasons.empty else reasons.iloc[-1],
        "forwards": dict(Counter(forwards)),
    }


_SPEED_UPS: dict[str, Measure] = {
    "speed_up": whole,
    "prefill_speed_up": prefill,
    "decode_speed_up": decoding,
}


def _rates(given: pd.DataFrame) -> Figures:
    """What is called decoding leaves the prompts' forwards out, and the tokens that they yield."""
    tokens, steps = given.num_new_tokens.sum(), given.num_steps.sum()
    nodes = given.num_nodes.sum(skipna=False)
    spent, decoded = decoding(given)
    return {
        "num_new_tokens": int(tokens),
        "tokens_per_step": _ratio(tokens - len(given), steps),
        "nodes_per_step": _ratio(nodes, steps),
        "goodput": _ratio(tokens, given.seconds.sum()),
        "ms_per_token": _ratio(1000 * given.seconds.sum(), tokens),
        "prefill_ms": _ratio(1000 * given.prefill_seconds.sum(), given.prefill_seconds.count()),
        "decode_ms_per_token": _ratio(1000 * spent.sum(), decoded.sum()),
    }


def _stages(given: pd.DataFrame) -> Figures:
    """Where time goes, by those who say so; a stage that nobody knows yet comes after."""
    spent = _added(given, "stage_seconds")
    names = [name for name in (*STAGES, *spent) if name in spent and name not in _ONCE_A_CALL]
    stages = {name: spent[name] for name in names}
    steps, total = max(given.num_steps.sum(), 1), sum(stages.values())
    return {
        "stage_ms": {name: float(1000 * seconds / steps) for name, seconds in stages.items()},
        "call_ms": {n: 1000 * spent[n] / len(given) for n in _ONCE_A_CALL if n in spent},
        "overhead": 1 - spent["forward"] / total if total else None,
    }


def processor_share(answers: pd.DataFrame) -> float | None:
    """The part of the processor that other programs left; None: not measured, as on a GPU."""
    return _number(answers.processor_share.median())


def is_busy(share: float | None) -> bool:
    """Did other programs take so much of the processor that times say little?"""
    return share is not None and share < LEAST_SHARE


def without_times(figures: Figures) -> Figures:
    """What stays true on a busy machine."""
    empty: Figures = {"speed_up_by_round": [], "stage_ms": {}, "call_ms": {}}
    return {**figures, **dict.fromkeys(_OF_TIMES), **empty}


def pooled(answers: pd.DataFrame, method: str, name: str) -> Counter[Any]:
    """The sum of a histogram or of counts by name, such as `widths`, over a method's answers."""
    return _added(answers[answers.method == method], name)


def _added(answers: pd.DataFrame, name: str) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for counts in answers[name]:
        total.update(counts)
    return total


def costs(answers: pd.DataFrame, method: str, of: Measure = whole) -> pd.DataFrame:
    """By question, the `seconds` and `tokens` of a method; what it failed on is left out.

    Of several rounds that with the median of the seconds counts, for each turn by itself.
    """
    own = answers[answers.method == method]
    own = own[~own.question.isin(own.question[own.seconds.isna()])]
    seconds, tokens = of(own)
    tried = own[["question", "turn"]].assign(seconds=seconds, tokens=tokens).sort_values("seconds")
    turns = tried.groupby(["question", "turn"])
    middle = tried[turns.cumcount() == (turns.seconds.transform("size") - 1) // 2]
    return middle.groupby("question")[["seconds", "tokens"]].sum()


def variation(answers: pd.DataFrame, method: str) -> float | None:
    """How far a method's seconds for one and the same turn lie apart in several rounds.

    The median over turns of (most - least) / least; None where nothing was answered twice.
    """
    own = answers[(answers.method == method) & answers.seconds.notna()]
    tried = own.groupby(["question", "turn"]).seconds.agg(["min", "max", "size"])
    tried = tried[tried["size"] > 1]
    return _number((tried["max"] / tried["min"] - 1).median())


def ratios(slow: pd.DataFrame, fast: pd.DataFrame) -> dict[str, Any] | None:
    """How much faster the second is on the questions that both have, at the first's lengths.

    `total` is that of all questions' seconds, and 95 % of resamplings of the questions put it
    between `low` and `high`; `mean`, `min`, `q1`, `median`, `q3` and `max` are over questions.
    """
    both = slow.add_suffix("_slow").join(fast.add_suffix("_fast"), how="inner")
    both = both[(both.tokens_slow > 0) & (both.tokens_fast > 0)]
    if both.empty:
        return None
    left = both.seconds_slow
    right = both.seconds_fast * both.tokens_slow / both.tokens_fast
    low, high = _interval(left.to_numpy(), right.to_numpy())
    each = left / right
    quartiles = each.quantile([0, 0.25, 0.5, 0.75, 1]).tolist()
    return {
        "num_questions": len(both),
        "total": float(left.sum() / right.sum()),
        "low": low,
        "high": high,
        "mean": float(each.mean()),
        **dict(zip(("min", "q1", "median", "q3", "max"), quartiles, strict=True)),
    }


def _interval(left: Any, right: Any) -> tuple[float, float]:
    """The bootstrap's 95 %: the total of questions drawn anew, with replacement."""
    generator = np.random.default_rng(_SEED)
    drawn = generator.integers(len(left), size=(_RESAMPLES, len(left)))
    totals = left[drawn].sum(1) / right[drawn].sum(1)
    low, high = np.percentile(totals, [2.5, 97.5])
    return float(low), float(high)


def _speed_up(answers: pd.DataFrame, method: str, of: Measure) -> dict[str, Any] | None:
    """None for stock itself."""
    if method == STOCK:
        return None
    return ratios(costs(answers, STOCK, of), costs(answers, method, of))


def _by_round(answers: pd.DataFrame, method: str) -> list[float]:
    if answers["round"].nunique() == 1:
        return []
    found = (_speed_up(part, method, whole) for _, part in answers.groupby("round"))
    return [result["total"] for result in found if result is not None]


def _drafting_speed_up(
    answers: pd.DataFrame, method: str, given: pd.DataFrame
) -> dict[str, Any] | None:
    """Of a method of ours whose forward is that of `FORWARD_ONLY`; None for all others."""
    if method == FORWARD_ONLY or given.num_nodes.isna().all():
        return None
    return ratios(costs(answers, FORWARD_ONLY), costs(answers, method))


def _ratio(part: float, of: float) -> float | None:
    return _number(part / of) if of else None


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
