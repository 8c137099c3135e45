"""The cost of a node beside the forward, from steps of many widths."""

from __future__ import annotations

import random

import pytest

from selfspec.cost import CostCurve, NodeCost, WidthSearch, best_width
from tests.oracles import token_rates


def taught(num_steps: int, widths: range, *, fixed: float = 0.5e-3, node: float = 5e-5) -> NodeCost:
    chance, cost = random.Random(3), NodeCost()
    for _ in range(num_steps):
        width = chance.choice(widths)
        noise = chance.uniform(0.8, 1.2)
        cost.observe(width, noise * (fixed + node * width))
    return cost


def test_nothing_is_assumed_before_any_step():
    assert NodeCost().seconds == 0


def test_only_what_grows_with_the_width_is_counted():
    assert taught(300, range(1, 40)).seconds == pytest.approx(5e-5, rel=0.15)
    assert taught(300, range(1, 40), node=0).seconds < 1e-5


def test_where_the_width_does_not_change_there_is_nothing_to_see():
    assert taught(300, range(8, 9)).seconds == 0


def test_a_step_that_was_held_up_hardly_counts():
    cost = taught(300, range(1, 40))
    before = cost.seconds
    cost.observe(2, 5.0)
    assert cost.seconds == pytest.approx(before, rel=0.3)


def test_a_change_is_followed():
    cost = taught(300, range(1, 40), node=1e-6)
    chance = random.Random(4)
    for _ in range(400):
        width = chance.randrange(1, 40)
        cost.observe(width, 0.5e-3 + 5e-5 * width)
    assert cost.seconds == pytest.approx(5e-5, rel=0.1)


@pytest.mark.parametrize("node_cost", [0.0, 0.01, 0.1, 1.0])
def test_it_counts_when_a_width_is_chosen(node_cost):
    curve, scores = CostCurve({1: 1.0, 4: 1.1, 16: 2.0}), [0.9, 0.5, 0.2, 0.1, 0.05, 0.04, 0.03]
    rates = token_rates([scores], lambda w: curve.seconds(w) + (w - 1) * node_cost, 8)
    width = rates.index(max(rates)) + 1
    assert best_width([scores], curve, 8, node_cost=node_cost).width == width
    search = WidthSearch(curve, 8, node_cost=node_cost)
    assert all(not search.take(score) or search.num_nodes <= 8 for score in scores)
    assert search.best.width == width
