"""Greedy growth finds the best tree of all, by brute force."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.cost import CostCurve
from selfspec.fitting import AcceptanceCounts, TreeSearch, best_fit, best_tree, fitted

PLACES = [path for depth in (1, 2, 3) for path in product((0, 1), repeat=depth)]
shares = st.sampled_from([0.0, 0.05, 0.3, 0.3, 0.6, 1.0])
# The rates of two candidates behind each node of three levels.
by_place = st.fixed_dictionaries(
    {path: st.tuples(shares, shares) for path in [(), *PLACES] if len(path) < 3}
)


def chance_of(path, rates) -> float:
    return prod(rates(path[:depth])[rank] for depth, rank in enumerate(path))


def is_tree(paths) -> bool:
    return all(len(path) == 1 or path[:-1] in paths for path in paths)


def best_of_all(rates, num_nodes) -> float:
    """The expected acceptance of the best of all trees, tried one by one."""
    every = (set(paths) for n in range(num_nodes + 1) for paths in combinations(PLACES, n))
    return max(sum(chance_of(p, rates) for p in paths) for paths in every if is_tree(paths))


@settings(max_examples=25)
@given(by_place, st.integers(1, 5))
def test_adding_the_likeliest_next_equals_brute_force(places, num_nodes):
    def rates(path):
        return places.get(path, ())

    tree = best_tree(rates, num_nodes)
    assert is_tree(tree)
    assert len(tree) <= num_nodes
    assert sum(tree.values()) == pytest.approx(best_of_all(rates, num_nodes))
    assert sum(tree.values()) == pytest.approx(sum(chance_of(path, rates) for path in tree))


def counted() -> AcceptanceCounts:
    counts = AcceptanceCounts()
    counts.trials.update({(): 1000, (0,): 600, (1,): 200})
    counts.hits.update({(0,): 600, (1,): 200, (0, 0): 100, (1, 0): 190})
    return counts


def test_the_first_places_of_a_tree_are_the_best_narrower_one():
    search, curve = TreeSearch(counted(), max_depth=4), CostCurve({1: 1.0, 8: 1.7})
    fits = {width: search.fit(width, curve) for width in (3, 4, 8)}
    assert fits[4].tree.slots == ((0, 0), (0, 1), (2, 0))  # behind the second candidate
    assert fits[3].tree.slots == fits[4].tree.slots[:2]
    assert fits[8].tree.slots[:3] == fits[4].tree.slots
    best = best_fit(list(fits.values()))
    assert best.rate == max(fit.tree.expected / fit.seconds for fit in fits.values())
    free = CostCurve({1: 1.0, 64: 1.0})
    assert best_fit([search.fit(w, free) for w in (3, 8)]).tree.width == 8


def test_a_tree_has_no_more_nodes_than_candidates_came_true():
    counts = AcceptanceCounts()
    counts.trials[()] = counts.hits[0,] = 4
    fit = TreeSearch(counts, max_depth=2).fit(9, CostCurve({1: 1.0}))
    assert fit.tree.slots == ((0, 0), (1, 0))
    assert fitted({}).width == 1
