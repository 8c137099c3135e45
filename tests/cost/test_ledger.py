"""Drafts may lose a little to find out what they bring, and no more."""

from __future__ import annotations

import pytest

from selfspec.cost import CostCurve, MeasuredBudget, StepTime
from selfspec.cost.ledger import Ledger
from selfspec.records import DraftTree, StepRecord


def lost(ledger: Ledger, num_steps: int, loss: float) -> int:
    """How many steps drafted, if each did that had room for it and lost that many plain steps."""
    num_drafted = 0
    for _ in range(num_steps):
        drafts = ledger.may_lose() >= loss
        ledger.observe(1.0 + loss * drafts, -loss * drafts)
        num_drafted += drafts
    return num_drafted


@pytest.mark.parametrize("loss", [0.2, 1.0, 5.0])
def test_what_drafts_lose_is_bounded(loss):
    for num_steps in (32, 128, 2000):
        num_drafted = lost(Ledger(), num_steps, loss)
        assert num_drafted * loss <= 1.0 + 0.02 * (num_steps + num_drafted * loss)


def test_a_loss_is_forgiven_where_steps_cost_something_else():
    ledger = Ledger()
    ledger.observe(2.0, -1.0)
    assert ledger.may_lose() < 0.1
    ledger.forgive()
    assert 1.0 < ledger.may_lose() < 1.1
    ledger.observe(1.0, 3.0)
    ledger.forgive()  # A gain stays.
    assert ledger.may_lose() > 4.0


def test_gains_may_be_lost_again_but_not_for_ever():
    ledger = Ledger()
    for _ in range(1000):
        ledger.observe(1.0, 2.0)
    assert 8 <= lost(ledger, 100, 1.0) < 40


def test_scores_that_promise_too_much_are_trusted_less():
    ledger = Ledger()
    assert ledger.trust == 1.0
    for _ in range(40):
        ledger.observe(1.0, 0.0, promised=2.0, num_accepted=1)
    assert ledger.trust == pytest.approx(0.5, abs=0.1)
    for _ in range(80):
        ledger.observe(1.0, 0.0, promised=2.0, num_accepted=4)
    assert ledger.trust == 1.0


def steps(budget: MeasuredBudget, num_steps: int, cost: float, drafting: float = 0.0) -> list[int]:
    """The widths of steps with a fixed cost a query that bring one token each, whatever they draft.

    Each draft seems sure.
    """
    widths = []
    for _ in range(num_steps):
        step = budget.step(64)
        tree, search = DraftTree.of_root(1), step.search()
        while search is not None and len(tree) < step.max_nodes and search(tree, 0.9):
            tree.add(0, len(tree), 0.9)
        step.fit([tree])
        widths.append(len(tree))
        record = StepRecord(row=0, tree=tree, path=[0], committed_ids=[2])
        step.observe(StepTime(len(tree), drafting, 1 + cost * (len(tree) - 1)), [record])
    return widths


def overhead(widths: list[int], cost: float) -> float:
    return sum(cost * (width - 1) for width in widths)


@pytest.mark.parametrize("believed", [0.01, 0.2, 0.7])
@pytest.mark.parametrize("cost", [0.05, 0.3, 1.0])
def test_what_useless_drafts_lose_is_bounded_whatever_the_curve_says(believed, cost):
    """One try may go wrong at a price that nobody knew; then the loss is worked off."""
    widths = steps(MeasuredBudget(CostCurve.unknown(believed)), 400, cost)
    first = max(cost * (width - 1) for width in widths)
    assert overhead(widths, cost) <= 1 + 0.0225 * 400 + first
    late = widths[-100:]
    assert overhead(late, cost) <= 0.03 * 100 + 1


def test_looking_for_drafts_is_a_loss_too():
    """On a fast device to look may take longer than the wider step."""
    budget = MeasuredBudget(CostCurve({1: 1.0, 64: 1.0}))
    looked = 0
    for _ in range(400):
        step = budget.step(64)
        looked += step.max_nodes > 1
        record = StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[2])
        step.observe(StepTime(1, 0.2 * (step.max_nodes > 1), 1.0), [record])
    assert 0.2 * looked <= 1 + 0.02 * 400


def test_many_short_calls_lose_no_more_than_a_long_one():
    ledger, widths = Ledger(), []
    for _ in range(20):
        curve = CostCurve({1: 1.0, 64: 64.0})
        widths += steps(MeasuredBudget(curve, ledger=ledger), 20, 1.0)
    assert overhead(widths, 1.0) <= 1 + 0.02 * 800


def test_while_all_is_drafted_plain_steps_are_timed_now_and_then():
    budget, plain = MeasuredBudget(CostCurve({1: 1.0, 64: 1.0})), 0
    for _ in range(300):
        step = budget.step(64)
        plain += step.max_nodes == 1
        tree = DraftTree.of_root(1)
        for node in range(min(3, step.max_nodes - 1)):
            tree.add(node, 2, 0.9)
        ids = [2] * len(tree)
        record = StepRecord(row=0, tree=tree, path=list(range(len(tree))), committed_ids=ids)
        step.observe(StepTime(len(tree), 0.0, 1.0), [record])
    assert plain == 4
