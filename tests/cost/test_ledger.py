"""Drafts may lose a little to find out what they bring, and no more."""

from __future__ import annotations

import pytest

from selfspec.cost import CostCurve, MeasuredBudget
from selfspec.cost.ledger import Ledger
from selfspec.records import DraftTree, StepRecord


def lost(ledger: Ledger, num_steps: int, loss: float) -> int:
    """How many of so many steps drafted, if each that did lost so many plain steps."""
    num_drafted = 0
    for _ in range(num_steps):
        drafts = ledger.may_lose(1.0)
        ledger.observe(1.0 + loss * drafts, -loss * drafts)
        num_drafted += drafts
    return num_drafted


@pytest.mark.parametrize("loss", [0.2, 1.0, 5.0])
def test_what_drafts_lose_is_bounded(loss):
    for num_steps in (32, 128, 2000):
        num_drafted = lost(Ledger(), num_steps, loss)
        assert num_drafted >= 1
        total = num_steps + num_drafted * loss
        assert num_drafted * loss <= 1.0 + 0.02 * total + loss


def test_gains_may_be_lost_again_but_not_for_ever():
    ledger = Ledger()
    for _ in range(1000):
        ledger.observe(1.0, 2.0)
    assert ledger.may_lose(1.0)
    assert lost(ledger, 100, 1.0) < 100


def steps(budget: MeasuredBudget, widths: list[int], cost: float) -> list[int]:
    """The widths allowed in steps of a fixed cost a query that bring one token each."""
    allowed = []
    for _ in widths:
        width = budget.max_nodes(64)
        allowed.append(width)
        record = StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[2])
        budget.observe(width, 1 + cost * (width - 1), [record])
    return allowed


def test_wide_steps_are_found_out_step_by_step():
    allowed = steps(MeasuredBudget(CostCurve.unknown(0.004)), [0] * 6, 0.001)
    assert allowed[:2] == [1, 1]  # Plain ones first: everything is weighed against them.
    assert allowed[2:6] == [2, 4, 8, 16]


def test_where_wide_steps_are_dear_few_are_tried():
    allowed = steps(MeasuredBudget(CostCurve.unknown(0.2)), [0] * 32, 1.0)
    assert sum(width > 1 for width in allowed) <= 2


def test_many_short_calls_lose_no_more_than_a_long_one():
    ledger, tried = Ledger(), 0
    for _ in range(20):
        budget = MeasuredBudget(CostCurve({1: 1.0, 64: 64.0}), ledger=ledger)
        tried += sum(width > 1 for width in steps(budget, [0] * 20, 1.0))
    assert tried <= 1 + 0.02 * 500
