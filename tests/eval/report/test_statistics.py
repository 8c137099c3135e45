"""Figures of synthetic rows whose values are known."""

from __future__ import annotations

from typing import Any

import pytest

from eval.report.rows import Line, frame_of
from eval.report.statistics import STAGES, by_task, costs, figures, variation


def answer(
    question: int, method: str, seconds: float | None, *, tokens: int = 10, **more: Any
) -> Line:
    """None seconds: it failed."""
    line = {"run": "r", "method": method, "task": "qa", "question": question, "turn": 0, "round": 0}
    line |= {name: more.pop(name) for name in ("task", "turn", "round") if name in more}
    if seconds is None:
        return {**line, "error": "broken"}
    about = {"num_prompt_tokens": 5, "num_new_tokens": tokens, "prefill_seconds": 0.25}
    return {**line, "numbers": {"seconds": seconds, "num_steps": tokens - 1, **about, **more}}


def of(lines: list[Line], method: str) -> dict[str, Any]:
    return figures(frame_of(lines), method)


QA = [
    answer(1, "forward-only", 8.0, num_nodes=9),
    answer(2, "forward-only", 17.0, num_nodes=9),
    answer(1, "stock", 10.0),
    answer(1, "ours", 5.0, num_steps=3, num_nodes=48, same="identical"),
    answer(2, "stock", 20.0),
    answer(2, "ours", 20.0, num_steps=9, num_nodes=9, same="near-tie"),
]
MATH = [
    answer(3, "stock", 10.0, task="math"),
    answer(3, "ours", None, task="math"),
    # Another text, and one twice as long: it counts with half its seconds.
    answer(4, "stock", 10.0, task="math"),
    answer(4, "ours", 10.0, tokens=20, task="math", num_nodes=19, same="different"),
]


def test_figures_of_known_rows():
    qa = of(QA, "ours")
    assert (qa["num_answers"], qa["num_failed"], qa["num_new_tokens"]) == (2, 0, 20)
    assert (qa["tokens_per_step"], qa["nodes_per_step"]) == (18 / 12, 57 / 12)
    assert (qa["goodput"], qa["ms_per_token"], qa["prefill_ms"]) == (20 / 25, 1250, 250)
    assert qa["decode_ms_per_token"] == pytest.approx(1000 * (4.75 + 19.75) / 18)
    assert (qa["num_same"], qa["num_near_ties"], qa["num_different"]) == (1, 1, 0)
    assert qa["speed_up"]["total"] == 30 / 25  # as a user waits: all seconds over all seconds
    spread = [qa["speed_up"][name] for name in ("min", "q1", "median", "q3", "max", "mean")]
    assert spread == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0, 1.5])
    # Of four resamplings of two questions two are mixed and one is either, so 95 % spans all.
    assert (qa["speed_up"]["low"], qa["speed_up"]["high"]) == (1.0, 2.0)
    assert qa["drafting_speed_up"]["total"] == 25 / 25  # over our forward without drafts
    assert of(QA, "forward-only")["drafting_speed_up"] is None
    assert qa["decode_speed_up"]["total"] == pytest.approx((9.75 + 19.75) / (4.75 + 19.75))


def test_what_failed_has_no_part_in_a_speed_up():
    nothing = of([answer(1, "stock", 1.0), answer(1, "ours", None)], "ours")
    names = ("num_failed", "tokens_per_step", "goodput", "ms_per_token", "speed_up")
    assert [nothing[name] for name in names] == [1, None, None, None, None]
    parts = by_task(frame_of(QA + MATH))
    assert list(parts["ours"]) == ["qa", "math", "overall"]
    overall, stock = parts["ours"]["overall"], parts["stock"]["overall"]
    assert (overall["num_answers"], overall["num_failed"]) == (3, 1)
    assert overall["speed_up"]["num_questions"] == 3
    assert overall["speed_up"]["total"] == 40 / (5 + 20 + 10 / 2)
    assert (stock["speed_up"], stock["tokens_per_step"], stock["nodes_per_step"]) == (None, 1, None)


def test_of_several_rounds_the_median_counts_and_turns_are_added_up():
    seconds = {"stock": (10.0, 30.0, 12.0), "ours": (5.0, 6.0, 20.0)}
    rounds = [
        answer(1, name, spent, round=number)
        for name, each in seconds.items()
        for number, spent in enumerate(each)
    ]
    found = of(rounds, "ours")
    assert found["speed_up"]["total"] == 12 / 6
    assert found["speed_up_by_round"] == [2.0, 5.0, 0.6]
    assert variation(frame_of(rounds), "stock") == 2.0
    spent = {(1, "stock"): (10, 30), (1, "ours"): (10, 10), (2, "stock"): (10, 10)}
    spent[2, "ours"] = (1, None)  # so the question is out
    turns = [answer(*key, each, turn=n) for key, two in spent.items() for n, each in enumerate(two)]
    found = of(turns, "ours")["speed_up"]
    assert (found["num_questions"], found["total"], found["mean"]) == (1, 2.0, 2.0)
    assert list(costs(frame_of(turns), "ours").index) == ["1"]


def test_the_time_of_a_step_by_stage_and_what_belongs_to_no_step():
    stages = {"wait": 1.0, "prefill": 9.0, **dict.fromkeys(STAGES, 0.5)}
    answers = [answer(n, "ours", 9.0, num_steps=2, stage_seconds=stages) for n in (1, 2)]
    found = of(answers, "ours")
    assert found["stage_ms"] == {**dict.fromkeys(STAGES, 250.0), "wait": 500.0}
    assert (found["call_ms"], found["overhead"]) == ({"prefill": 9000.0}, 1 - 0.5 / 4.0)
    plain = answer(1, "ours", 1.0, disabled_reason="no attention", stage_seconds={"plain": 1.0})
    found = of([plain, answer(2, "ours", 1.0)], "ours")
    assert (found["disabled_reason"], found["call_ms"]) == ("no attention", {"plain": 500.0})
