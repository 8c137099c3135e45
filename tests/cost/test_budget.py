"""A budget spends what pays: trees are cut to it, and drafting rests where it brings nothing."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.cost import Budget, CostCurve, MeasuredBudget, StepTime, best_width
from selfspec.cost.budget import MeasuredStep
from selfspec.records import DraftTree, StepRecord
from tests.strategies import check_tree, trees

CURVES = st.lists(st.floats(0.01, 2), min_size=8, max_size=8).map(
    lambda steps: CostCurve({w: 1 + sum(steps[:w]) for w in range(1, 9)})
)

TOOK = StepTime(4, 0.0, 1.0)


def record(num_accepted: int = 0, **counted: int) -> StepRecord:
    """A step in which the first drafts of a chain of three were right."""
    tree = DraftTree.of_root(1)
    for node, score in enumerate((0.9, 0.6, 0.3)):
        tree.add(node, 2, score)
    path = list(range(num_accepted + 1))
    return StepRecord(row=0, tree=tree, path=path, committed_ids=[2] * len(path), **counted)


@given(trees(max_nodes=8), st.integers(1, 9))
def test_a_cut_tree_is_the_one_that_was_grown_so_far(tree, num_nodes):
    expected = DraftTree.of_root(tree.tokens[0])
    for node in range(1, min(len(tree), num_nodes)):
        expected.add(tree.parents[node], tree.tokens[node], tree.scores[node], tree.evidence[node])
    tree.cut(num_nodes)
    check_tree(tree)
    assert tree == expected


@given(st.lists(trees(max_nodes=8), min_size=1, max_size=3), CURVES)
def test_all_rows_are_cut_to_the_width_that_pays(batch, curve):
    cut = copy.deepcopy(batch)
    step = MeasuredBudget(curve).step(8)
    step.fit(cut)
    worth = [[0.01 + score for score in tree.scores[1 : step.max_nodes]] for tree in batch]
    width = best_width(worth, curve, step.max_nodes).width
    assert [len(tree) for tree in cut] == [min(len(tree), width) for tree in batch]


def test_a_fixed_budget_takes_all_that_is_allowed():
    budget = Budget()
    tree = DraftTree.of_root(1)
    tree.add(0, 2, 1e-9)
    for _ in range(50):
        step = budget.step(7)
        assert step.max_nodes == 7
        assert step.search() is None
        step.fit([tree])
        step.observe(StepTime(2, 0.0, 1.0), [record()])
    assert len(tree) == 2


def test_one_drafting_that_was_held_up_does_not_forbid_the_next_ones():
    budget = MeasuredBudget(CostCurve({1: 1.0, 8: 1.5}))
    for drafting in (0.5, 100.0, 0.5, 0.5, 100.0, 0.5):
        step = budget.step(8)
        assert step.max_nodes > 1
        step.observe(StepTime(8, drafting, 1.5), [record(2)])
    for _ in range(3):  # Drafting that stays slow is charged.
        budget.step(8).observe(StepTime(8, 100.0, 1.5), [record(2)])
    assert budget.step(8).max_nodes == 1


def test_what_was_decided_is_said_in_a_line():
    budget = MeasuredBudget(CostCurve({1: 1.0, 64: 1.5}))

    def see(*widths):
        for width in widths:
            alone = StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[2])
            budget.step(8).observe(StepTime(width, 0.0, 1.9 if width == 2 else 1.0), [alone])

    see(*[1] * 11, *[2] * 11)
    assert budget.paused(11, 22) is None
    assert budget.paused(16, 33) is None
    said = budget.paused(16, 27)
    assert str(said).startswith("no drafts in 16 of 27 steps: a step of 4 tokens takes 1.")
    assert Budget().paused(27, 27) is None


def test_all_rows_wait_for_what_one_of_them_looks_for():
    budget = MeasuredBudget()
    budget.use_curve(1, CostCurve({1: 2.0, 8: 9.0}))
    assert (budget.curve.seconds(1), budget.break_even_tokens(0.5)) == (2.0, 0.25)
    budget.use_curve(4, CostCurve({1: 5.0, 8: 9.0}))
    assert (budget.curve.seconds(1), budget.break_even_tokens(0.5)) == (5.0, 0.4)


def test_seconds_cost_tokens_at_the_rate_of_the_moment():
    """Once drafts bring three tokens in 1.5 plain steps, a plain step's time is worth two."""
    budget = MeasuredBudget(CostCurve({1: 2.0, 8: 3.0}))
    for num_accepted, rate in ((2, 2.0), (0, 1 / 1.5)):
        for _ in range(160):
            step = MeasuredStep(budget, 8)
            step.observe(StepTime(8, 0.0, 3.0), [record(num_accepted)])
        assert budget.break_even_tokens(2.0) == pytest.approx(rate, rel=0.02)
        budget.charge(100.0)  # To begin brings no token, and says nothing of the next seconds.
        assert budget.break_even_tokens(2.0) == pytest.approx(rate, rel=0.02)
    for _ in range(160):
        MeasuredStep(budget, 1).observe(StepTime(1, 0.0, 2.0), [record()])
    assert budget.break_even_tokens(2.0) == pytest.approx(1.0, rel=0.02)
