"""A draft model's forwards are paid for by what they bring, or it is left out and tried again."""

from __future__ import annotations

import pytest

from selfspec.cost import CostCurve, MeasuredBudget, Pacing, Took
from selfspec.records import DraftTree, Evidence, StepRecord

PLAIN = 1.0


def levels_read(
    forward: float,
    hits: int,
    num_steps: int,
    pacing: Pacing | None = None,
    setting_up: float = 0.0,
) -> list[int]:
    """How many forwards each step had: the draft model foresees `hits` tokens, and none further.

    Each level promises 0.8 of the level above it.
    """
    pacing = pacing or Pacing()
    budget = MeasuredBudget(CostCurve({1: PLAIN, 64: 1.2 * PLAIN}), pacing)
    found = []
    for _ in range(num_steps):
        num_read = 0
        step = budget.step(16)
        if step.max_nodes > 1:
            while num_read < 12 and budget.pays_to_read([0.8**num_read]):
                budget.observe_reading(forward, 1, setting_up)
                num_read += 1
        width = 1 + num_read
        took = Took(width, (forward + setting_up) * num_read, (1 + width / 320) * PLAIN)
        step.observe(took, [record(min(num_read, hits))])
        found.append(num_read)
    return found


def record(num_accepted: int) -> StepRecord:
    tree = DraftTree.of_root(1)
    for node in range(num_accepted):
        tree.add(node, 2, 0.8**node, (Evidence("draft model"),))
    path = list(range(num_accepted + 1))
    return StepRecord(row=0, tree=tree, path=path, committed_ids=[2] * len(path))


def test_cheap_levels_are_read_until_they_promise_too_little():
    cheap, dear = levels_read(0.01, 4, 200)[-30:], levels_read(0.1, 4, 200)[-30:]
    assert max(cheap) > max(dear) > 1
    assert cheap.count(0) <= 1  # One step in 32 shows what is gained.


def test_what_captures_take_is_charged_to_no_step():
    found = levels_read(1 / 64, 4, 200, setting_up=64 * PLAIN)
    assert found == levels_read(1 / 64, 4, 200)


@pytest.mark.parametrize(("forward", "hits"), [(1.1, 1), (0.2, 0), (5.0, 4)])
def test_one_that_does_not_pay_is_left_out_and_tried_again(forward, hits):
    found = levels_read(forward, hits, 600)
    late = found[200:]
    assert sum(late) * forward < 0.05 * len(late) * PLAIN
    assert sum(found[-400:]) > 0


def test_what_was_learned_outlives_a_call():
    pacing = Pacing()
    levels_read(0.9, 0, 100, pacing)
    assert sum(levels_read(0.9, 0, 20, pacing)) <= 1


def test_a_slow_moment_is_not_held_against_it():
    pacing = Pacing()
    before = sum(levels_read(0.05, 4, 30, pacing))
    pacing.may_read(PLAIN)
    assert pacing.observe_forward(50 * PLAIN, 1) < 0.1 * PLAIN
    assert sum(levels_read(0.05, 4, 30, pacing)) > before / 2


def test_without_a_draft_model_nothing_is_read():
    assert not MeasuredBudget(CostCurve({1: 1.0})).pays_to_read([1.0])


def test_a_prompt_pays_if_half_the_time_of_what_is_left_is_more():
    pacing = Pacing()
    assert pacing.pays_to_begin(1000, 1)  # Nothing is known yet.
    pacing.may_read(PLAIN)
    pacing.observe_prompt(10 * PLAIN, 100)
    assert pacing.pays_to_begin(100, 21)
    assert not pacing.pays_to_begin(100, 19)


def test_a_prompt_that_was_slow_to_read_is_not_the_last_one():
    pacing = Pacing()
    pacing.may_read(PLAIN)
    pacing.observe_prompt(1000 * PLAIN, 100)
    read = [pacing.pays_to_begin(100, 256) for _ in range(20)]
    assert read.count(True) == 1
    pacing.observe_prompt(PLAIN, 10_000)
    assert pacing.pays_to_begin(100, 256)
