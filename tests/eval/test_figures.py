"""From synthetic rows to figures whose values are known, and rows to JSON and back."""

from __future__ import annotations

import doctest
import json

import pytest

from eval import bench_table, figures
from eval.answers import Answer, Row, row_from_json, row_to_json
from eval.bench_table import Costs, curve_json, curve_lines, figures_table, row_line, stage_table
from eval.figures import STAGES, Spread, bound, by_task, stage_seconds
from selfspec.cost import CostCurve
from selfspec.records import GenerationStats


def answer(seconds: float, num_new: int = 10, prefill: float = 1.0, **more) -> Answer:
    return Answer(num_new, seconds, prefill, **{"same": True, **more})


def steps(num_steps: int, num_new: int) -> GenerationStats:
    return GenerationStats(
        num_calls=1, num_new_tokens=num_new, num_prompt_tokens_out=1, num_steps=num_steps
    )


ROWS = [
    Row(1, "qa", 5, {"stock": answer(10.0), "b": answer(5.0, stats=steps(3, 10))}),
    Row(2, "qa", 5, {"stock": answer(20.0), "b": answer(20.0, stats=steps(9, 10))}),
    Row(3, "math", 5, {"stock": answer(10.0), "b": Answer(error="broken")}),
    # another text, and a longer one: compared by seconds a token
    Row(4, "math", 5, {"stock": answer(10.0), "b": answer(10.0, 20, same=False, differs_at=3)}),
]


def test_figures_of_known_rows():
    tasks = by_task(ROWS, "b")
    assert list(tasks) == ["qa", "math", "overall"]
    qa, overall = tasks["qa"], tasks["overall"]
    assert (qa.num_prompts, qa.num_failed, qa.num_same, qa.num_new_tokens) == (2, 0, 2, 20)
    assert qa.ms_per_token == pytest.approx(1250)
    assert qa.decode_ms_per_token == pytest.approx(1000 * (4 + 19) / 18)
    assert qa.prefill_ms == pytest.approx(1000)
    assert qa.speed_up is not None
    assert qa.speed_up.total == pytest.approx(30 / 25)
    assert qa.speed_up.spread == pytest.approx(Spread(1.0, 1.25, 1.5, 1.75, 2.0))
    assert qa.decode_speed_up is not None
    assert qa.decode_speed_up.total == pytest.approx((9 + 19) / (4 + 19))
    assert qa.stats is not None
    assert qa.stats.tokens_per_step == 18 / 12
    assert (overall.num_prompts, overall.num_failed, overall.num_same) == (3, 1, 2)
    assert overall.speed_up is not None
    # prompt 3 has no part in it; stock's 40 s and 30 tokens over 35 s and 40 tokens
    assert overall.speed_up.total == pytest.approx((40 / 30) / (35 / 40))
    assert overall.speed_up.spread.max == pytest.approx(2.0)


def test_stock_has_no_speed_up_and_a_failure_no_figures():
    assert by_task(ROWS, "stock")["overall"].speed_up is None
    failed = by_task(ROWS[2:3], "b")["overall"]
    assert (failed.num_prompts, failed.num_failed) == (0, 1)
    assert failed.speed_up is failed.decode_speed_up is failed.stats is None


def test_one_token_answers_have_no_decoding_to_compare():
    rows = [Row(1, "qa", 5, {"stock": answer(2.0, 1), "b": answer(1.0, 1)})]
    overall = by_task(rows, "b")["overall"]
    assert overall.speed_up is not None
    assert overall.speed_up.total == 2.0
    assert overall.decode_speed_up is None


def test_a_spread_of_one():
    assert Spread.of([3.0]) == (3.0,) * 5


def test_the_bound_is_the_best_width_of_a_perfect_drafter():
    curve = CostCurve({1: 0.01, 8: 0.02, 16: 0.08})
    assert bound(curve, 16) == (4.0, 8)
    assert bound(curve, 1) == (1.0, 1)
    assert bound(curve, 4) == (pytest.approx(4 * 0.01 / curve.seconds(4)), 4)


def test_a_flat_curve_is_bound_by_the_width_alone():
    assert bound(CostCurve({1: 0.01, 64: 0.01}), 16) == (16.0, 16)


@pytest.mark.parametrize("module", [figures, bench_table])
def test_examples_run(module):
    assert doctest.testmod(module).failed == 0


def test_rows_survive_json():
    stats = steps(3, 10)
    stats.accepted_lengths.update([0, 2, 2])
    stats.seconds.update({"forward": 0.5})
    stats.drafted_by_source.update(["lut"])
    row = Row("q1", "qa", 5, {"stock": answer(1.0), "b": answer(0.5, stats=stats)})
    again = row_from_json(json.loads(json.dumps(row_to_json(row))))
    assert again == row
    assert (again.answers["b"].stats + stats).accepted_lengths == {0: 2, 2: 4}


def test_a_failed_row_has_no_numbers():
    values = row_to_json(ROWS[2])
    assert values["answers"]["b"] == {"error": "broken"}
    assert row_from_json(json.loads(json.dumps(values))) == ROWS[2]


def test_the_stage_table_shares_add_up():
    stats = GenerationStats(num_calls=2, num_steps=2, num_nodes=8)
    stats.seconds.update(dict.fromkeys(STAGES, 0.5) | {"prefill": 9.0, "teach": 1.0})
    lines = stage_table(stats).splitlines()
    assert lines[0] == "2 steps, 4.0 nodes, ms a step and share:"
    assert [line.split()[-1] for line in lines[1:7]] == ["16.67%"] * 6
    assert lines[-2:] == ["  prefill 4500.000 ms a call", "  teach 500.000 ms a call"]


def test_a_stage_that_is_not_known_yet_has_its_line_too():
    stats = GenerationStats(num_steps=1)
    stats.seconds.update(dict.fromkeys(STAGES, 0.5) | {"wait": 1.0})
    assert list(stage_seconds(stats)) == [*STAGES, "wait"]
    assert "  wait     1000.000 ms  25.00%" in stage_table(stats)


def test_a_call_that_was_not_drafted_says_why():
    stats = GenerationStats(num_calls=1, num_steps=9, disabled_reason="it has no attention")
    stats.seconds["plain"] = 2.0
    assert stage_table(stats).endswith("not drafted as asked: it has no attention")


def test_a_line_for_each_prompt():
    assert row_line(ROWS[0]) == (
        "qa                  1   10 tokens  stock 1000.00 ms  b 500.00 ms 2.00x"
    )
    assert row_line(ROWS[2]).endswith("b FAILED (broken)")
    assert row_line(ROWS[3]).endswith("b 500.00 ms 2.00x (TEXT DIFFERS at token 3)")
    failed = Row(5, "qa", 5, {"stock": Answer(error="no"), "b": answer(5.0, same=None)})
    assert row_line(failed).endswith("stock FAILED (no)  b 500.00 ms")


def test_the_table_has_a_row_for_each_task_and_method():
    told = figures_table({name: by_task(ROWS, name) for name in ("stock", "b")}, {"c": "no GPU"})
    lines = told.splitlines()
    assert len(lines) == 2 + 3 * 2 + 1
    assert len({line.count("|") for line in lines}) == 1
    assert "| qa | b | 2 | 20 | 1250.00 |" in told
    assert "| 1.20x | 1.50x | 1.00x | 1.25–1.75x | 2.00x | 1.22x | 1.50 | 2 of 2 |" in told
    assert "| math | b | 1 (1 failed) |" in told
    assert "| overall | c | left out: no GPU |" in lines[-1]


def test_the_curve_and_its_bound():
    costs = Costs(CostCurve({1: 0.01, 8: 0.02, 64: 0.08}), 100, 8)
    told = curve_lines(costs)
    assert "a forward behind 100 columns:" in told
    assert "| plain steps | 1.00 | 2.00 | 8.00 |" in told
    assert "4.00x at width 8 within 8 nodes, 8.00x at width 64 within 64 nodes" in told
    assert curve_json(costs) == {
        "curve": {"context": 100, "ms": {"1": 10.0, "8": 20.0, "64": 80.0}},
        "bound": {"8": {"speed_up": 4.0, "width": 8}, "64": {"speed_up": 8.0, "width": 64}},
    }
