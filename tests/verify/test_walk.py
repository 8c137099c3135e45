"""The walk is the one greedy path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from selfspec.verify.walk import walk
from tests.strategies import ALPHABET, trees


@given(trees(max_nodes=10, alphabet=ALPHABET), st.lists(st.integers(0, ALPHABET - 1), min_size=10))
def test_the_walk_follows_the_models_tokens_as_far_as_the_tree_goes(tree, tokens):
    """`tokens[i]` is what the model says behind node i."""
    asked = []

    def commit(nodes: Sequence[int]) -> tuple[list[int], bool]:
        (node,) = nodes
        asked.append(node)
        return [tokens[node]], False

    (path,) = walk([tree], commit)
    assert asked == path
    assert path[0] == 0
    for above, below in pairwise(path):
        assert tree.parents[below] == above
        assert tree.tokens[below] == tokens[above]
    assert tokens[path[-1]] not in tree.children[path[-1]]


@given(trees(max_nodes=10, alphabet=ALPHABET), st.integers(1, 5))
def test_the_walk_ends_where_the_row_stops(tree, num_commits):
    """Even where the tree knows what would follow."""
    asked = []

    def commit(nodes: Sequence[int]) -> tuple[list[int], bool]:
        (node,) = nodes
        asked.append(node)
        token = min(tree.children[node], default=0)
        return [token], len(asked) == num_commits

    (path,) = walk([tree], commit)
    assert path == asked
    assert len(path) <= num_commits


@given(st.lists(trees(max_nodes=8, alphabet=ALPHABET), min_size=1, max_size=3), st.data())
def test_rows_that_move_together_end_where_the_first_one_falls_off(batch, data):
    """Each path is the start of the path that its tree has alone; one of them is all of it."""
    tokens = [data.draw(st.lists(st.integers(0, ALPHABET - 1), min_size=8)) for _ in batch]

    def said(group: Sequence[int]) -> Any:
        def commit(nodes: Sequence[int]) -> tuple[list[int], bool]:
            return [tokens[row][node] for row, node in zip(group, nodes, strict=True)], False

        return commit

    alone = [walk([tree], said([row]))[0] for row, tree in enumerate(batch)]
    together = walk(batch, said(range(len(batch))))
    shortest = min(map(len, alone))
    assert together == [path[:shortest] for path in alone]
