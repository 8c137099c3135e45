"""What a run came to, as `summary.json` has it: every figure, by method and task.

    schema, settings, environment, notes   of the run
    num_runs                               starts of the command
    num_done, num_asked                    questions that all methods answered, once for each round,
                                           of those of the run
    methods                                method -> task, or `overall` -> figures
    left_out                               methods that could not take part, and why
    errors                                 what failed, and how often
    processor_share                        what other programs left of a CPU; where that is
                                           little, all that comes from times is left out
    stock_variation                        of stock's seconds for one question from round to round
    curve                                  seconds of a forward by its width; null: not measured

A figure is null where there is nothing to say. `speed_up` is stock's seconds over the method's, of
whole calls: `total` of all questions together with the bootstrap's 95 % from `low` to `high`, then
`mean`, `median`, `q1`, `q3`, `min` and `max` over questions; a text of another length counts as if
it had stock's. `prefill_speed_up` is that of the time up to the end of the prompts' forwards, and
`decode_speed_up` that of all after it; `drafting_speed_up` is
over `forward-only` instead of stock, where that took part. `stage_ms` is the time of a step by
stage, `call_ms` what is spent once a call. Of several rounds a question counts with the median of
its seconds; `speed_up_by_round` has the total of each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from eval.methods.names import STOCK
from eval.report.rows import SCHEMA, Record
from eval.report.statistics import (
    OVERALL,
    by_task,
    is_busy,
    processor_share,
    variation,
    without_times,
)

_MUCH = 0.2  # Stock varies by less than this on a machine that does nothing else.


def summary(record: Record) -> dict[str, Any]:
    """Of all answers of a folder."""
    answers, first = record.frame, record.runs[0]
    share = processor_share(answers)
    shown = without_times if is_busy(share) else dict
    methods = {
        name: {task: _rounded(shown(figures)) for task, figures in parts.items()}
        for name, parts in by_task(answers).items()
    }
    return {
        "schema": SCHEMA,
        "settings": {**first["settings"], **_last_of(record, "limit", "rounds")},
        "environment": first["environment"],
        "notes": record.runs[-1]["notes"],
        "num_runs": len(record.runs),
        "methods": {name: methods[name] for name in first["settings"]["methods"]},
        "num_done": _num_done(answers, first["settings"]["methods"], record.runs[-1]),
        "num_asked": record.runs[-1]["num_asked"] * record.runs[-1]["settings"]["rounds"],
        "left_out": record.runs[-1]["left_out"],
        "errors": errors(answers),
        "processor_share": share,
        "stock_variation": variation(answers, STOCK),
        "curve": None if is_busy(share) else record.curve,
    }


def _num_done(answers: pd.DataFrame, methods: list[str], run: Mapping[str, Any]) -> int:
    taking_part = set(methods) - set(run["left_out"])
    tried = answers.groupby(["question", "round"]).method.agg(set)
    return sum(names >= taking_part for names in tried)


def _last_of(record: Record, *names: str) -> dict[str, Any]:
    """Settings in which a run may have been made longer."""
    settings = record.runs[-1]["settings"]
    return {name: settings[name] for name in names}


def trust(values: Mapping[str, Any]) -> str:
    """A sentence on how far the seconds of a run, and so its speed-ups, can be trusted."""
    share, varies = values["processor_share"], values["stock_variation"]
    if is_busy(share):
        return (
            f"The machine was busy: other programs left {share:.0%} of the processor, so times are "
            "left out. End them, and run this again with another --output."
        )
    if varies is None:
        return "Each time is of a single run; --rounds 3 shows how far they vary on this machine."
    told = f"Stock's own times for the same question vary by {varies:.0%} from round to round"
    if varies <= _MUCH:
        return f"{told}."
    return f"{told}: the machine was busy, and no speed-up here is surer than that."


def brief(values: Mapping[str, Any]) -> dict[str, Any]:
    """By method, the few figures that the last line of a run's output has."""
    methods = {name: parts[OVERALL] for name, parts in values["methods"].items()}
    return {
        name: {
            "tokens_per_step": figures["tokens_per_step"],
            "speed_up": figures["speed_up"] and figures["speed_up"]["total"],
            "num_failed": figures["num_failed"],
        }
        for name, figures in methods.items()
    }


def _rounded(value: Any) -> Any:
    """Numbers to five digits that count, wherever they stand."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def errors(answers: pd.DataFrame) -> dict[str, dict[str, int]]:
    """By method, each error with how often it came."""
    failed = answers[answers.error.notna()]
    return {
        name: part.error.value_counts().to_dict()
        for name, part in failed.groupby("method", sort=False)
    }
