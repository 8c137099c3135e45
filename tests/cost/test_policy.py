"""A budget spends what pays: trees are cut to it, and drafting rests where it brings nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from selfspec.cost import CostCurve, FixedBudget, MeasuredBudget, best_width
from selfspec.records import DraftTree
from tests.strategies import trees

CURVES = st.lists(st.floats(0.01, 2), min_size=8, max_size=8).map(
    lambda steps: CostCurve({w: 1 + sum(steps[:w]) for w in range(1, 9)})
)


def copied(tree: DraftTree) -> DraftTree:
    twin = DraftTree.of_root(tree.tokens[0])
    for node in range(1, len(tree)):
        twin.add(tree.parents[node], tree.tokens[node], tree.scores[node])
    return twin


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
    cut = [copied(tree) for tree in batch]
    MeasuredBudget(curve).fit(cut, 8)
    width = best_width([tree.scores[1:] for tree in batch], curve, 8).width
    assert [len(tree) for tree in cut] == [min(len(tree), width) for tree in batch]


def test_a_fixed_budget_takes_all_that_is_allowed():
    budget = FixedBudget()
    tree = DraftTree.of_root(1)
    tree.add(0, 2, 1e-9)
    for _ in range(50):
        assert budget.max_nodes(7) == 7
        assert budget.search(7) is None
        budget.fit([tree], 7)
        budget.observe(2, 1.0, 0)
    assert len(tree) == 2


def test_drafting_rests_where_it_brings_nothing_and_comes_back():
    budget = MeasuredBudget(CostCurve({1: 1.0, 8: 1.1}))
    looked = []
    for _ in range(100):
        looked.append(budget.max_nodes(8) > 1)
        budget.observe(8 if looked[-1] else 1, 1.0, 0)
    assert sum(looked[-50:]) < 6
    while budget.max_nodes(8) == 1:
        budget.observe(1, 1.0, 0)
    budget.observe(8, 1.0, 3)
    assert [budget.max_nodes(8) for _ in range(1)] == [8]


def test_steps_refine_the_curve():
    curve = CostCurve({1: 1.0, 8: 2.0})
    budget = MeasuredBudget(curve)
    for _ in range(400):
        budget.max_nodes(8)
        budget.observe(8, 4.0, 1)
    assert curve.seconds(8) > 3


def test_a_row_alone_stops_growing_where_nothing_wider_pays():
    search = MeasuredBudget(CostCurve({1: 1.0, 8: 8.0})).search(8)
    assert search is not None
    assert not search(0.1)
    assert MeasuredBudget(CostCurve({1: 1.0, 8: 8.0})).search(1) is None
