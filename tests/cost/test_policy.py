"""A budget spends what pays: trees are cut to it, and drafting rests where it brings nothing."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.cost import (
    CostCurve,
    FixedBudget,
    MeasuredBudget,
    ThresholdBudget,
    Took,
    best_width,
)
from selfspec.records import DraftTree, StepRecord
from tests.strategies import trees

CURVES = st.lists(st.floats(0.01, 2), min_size=8, max_size=8).map(
    lambda steps: CostCurve({w: 1 + sum(steps[:w]) for w in range(1, 9)})
)

TOOK = Took(4, 0.0, 1.0)


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
    tree.check()
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
    budget = FixedBudget()
    tree = DraftTree.of_root(1)
    tree.add(0, 2, 1e-9)
    for _ in range(50):
        step = budget.step(7)
        assert step.max_nodes == 7
        assert step.search() is None
        step.fit([tree])
        step.observe(Took(2, 0.0, 1.0), [record()])
    assert len(tree) == 2


def test_drafting_rests_where_it_brings_nothing_and_comes_back():
    budget = MeasuredBudget(CostCurve({1: 1.0, 8: 1.5}))

    def looks(num_accepted: int) -> bool:
        step = budget.step(8)
        looked = step.max_nodes > 1
        took = Took(8, 0.1, 1.5) if looked else Took(1, 0.0, 1.0)
        step.observe(took, [record(num_accepted * looked)])
        return looked

    assert sum([looks(0) for _ in range(100)][-50:]) < 10
    assert sum([looks(3) for _ in range(100)][-50:]) > 45


def test_a_row_alone_stops_growing_where_nothing_wider_pays():
    search = MeasuredBudget(CostCurve({1: 1.0, 8: 8.0})).step(8).search()
    assert search is not None
    assert not search(0.1)
    assert MeasuredBudget(CostCurve({1: 1.0, 8: 8.0})).step(1).search() is None


# -- branches beside the trees -----------------------------------------------------------------


def test_branches_get_what_costs_next_to_nothing():
    """16 queries cost no more than one, and a seventeenth costs a lot."""
    step = MeasuredBudget(CostCurve({1: 1.0, 16: 1.0, 24: 9.0, 64: 20.0})).step(24)
    assert [step.room_beside(width) for width in (1, 12, 16)] == [15, 4, 0]
    assert FixedBudget().step(8).room_beside(8) > 1000


def test_branches_rest_with_the_drafts():
    """Until plain steps were timed, nothing is drafted."""
    step = MeasuredBudget(CostCurve.unknown(0.0001)).step(8)
    assert (step.max_nodes, step.room_beside(1)) == (1, 0)
    assert FixedBudget().step(1).room_beside(1) == 0


# -- EdgeLLM's threshold -----------------------------------------------------------------------


def test_the_paper_s_rule():
    budget = ThresholdBudget(0.08)
    budget.observe(4, 4, 0.3)
    assert budget.threshold == pytest.approx(0.04)
    budget.observe(4, 1, 0.25)
    assert budget.threshold == pytest.approx(0.04 / 0.25**0.75)
    budget.observe(0, 0, 1.0)
    assert budget.threshold == pytest.approx(0.04 / 0.25**0.75)


@given(
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.floats(0, 1)), max_size=60),
)
def test_it_stays_between_0_and_1(start, paths):
    budget = ThresholdBudget(start)
    for num_drafted, num_correct, confidence in paths:
        before = budget.threshold
        budget.observe(num_drafted, min(num_correct, num_drafted), confidence)
        assert 0 < budget.threshold < 1
        if 0 < num_drafted <= num_correct:
            assert budget.threshold <= before
        else:
            assert budget.threshold >= before


def takes(budget: ThresholdBudget, score: float) -> bool:
    """Would a step draft a second node of this score?"""
    may_take = budget.step(8).search()
    assert may_take(1e-9), "one token is drafted in any case"
    return may_take(score)


def test_the_threshold_falls_while_drafts_are_right_and_rises_after_a_miss():
    budget = ThresholdBudget()
    assert takes(budget, 0.02)
    assert not takes(budget, 0.005)
    budget.step(8).observe(TOOK, [record(3)])
    assert takes(budget, 0.005)
    for _ in range(30):
        budget.step(8).observe(TOOK, [record(0)])
    assert not takes(budget, 0.9)
    for _ in range(30):
        budget.step(8).observe(TOOK, [record(3)])
    assert takes(budget, 1e-5)


def test_the_branch_that_was_right_longest_is_judged():
    """The first branch has the best leaf, the second one the most right tokens."""
    tree = DraftTree.of_root(1)
    tree.add(0, 2, 0.6)
    tree.add(0, 3, 0.3)
    tree.add(2, 4, 0.2)
    budget = ThresholdBudget()
    budget.step(8).observe(
        TOOK, [StepRecord(row=0, tree=tree, path=[0, 2, 3], committed_ids=[3, 4, 5])]
    )
    assert takes(budget, 0.0051), "a branch that was right to its end halves the threshold"


def test_after_a_miss_it_comes_back():
    """Each next token is right with a chance of .8, and drafts know it."""
    dice, budget, num_tokens = random.Random(2), ThresholdBudget(), 0
    for _ in range(2000):
        step = budget.step(16)
        tree, may_take, path = DraftTree.of_root(1), step.search(), [0]
        for node in range(15):
            if not may_take(0.8 * tree.scores[node]):
                break
            tree.add(node, 2, 0.8 * tree.scores[node])
            if len(path) == node + 1 and dice.random() < 0.8:
                path.append(node + 1)
        committed = [2] * len(path)
        num_tokens += len(committed)
        step.observe(TOOK, [StepRecord(row=0, tree=tree, path=path, committed_ids=committed)])
    assert num_tokens / 2000 > 2.7


def test_what_was_decided_is_said_in_a_line():
    budget = MeasuredBudget(CostCurve({1: 1.0, 64: 1.5}))
    for width in [1] * 11 + [2]:
        seconds = 1.9 if width == 2 else 1.0
        tree = DraftTree.of_root(1)
        alone = StepRecord(row=0, tree=tree, path=[0], committed_ids=[2])
        budget.step(8).observe(Took(width, 0.0, seconds), [alone])
    assert budget.paused is None
    for _ in range(30):
        budget.step(1).observe(Took(1, 0.0, 1.0), [alone])
    assert budget.paused == "drafts paused after step 12: 2 nodes took 1.9 plain steps"
