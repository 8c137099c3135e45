"""Branches ride blind to the tree, yield all their n-grams, and leave the global dice alone."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.draft.sources.branches import Branches
from selfspec.draft.sources.grams import GRAM_LENGTH
from selfspec.records import DraftTree, Evidence, StepRecord
from selfspec.run.layout import ancestors
from tests.strategies import trees

PROMPT = [11, 12, 13]


def branches_of(*tokens: list[int], max_length: int = 4) -> Branches:
    """Branches that stand where a test wants them."""
    branches = Branches(PROMPT, len(tokens), max_length)
    branches.tokens = [list(branch) for branch in tokens]
    return branches


def test_they_start_with_a_token_of_the_prompt():
    starts = Branches(PROMPT, 40, 6).tokens
    assert all(len(branch) == 1 for branch in starts)
    assert {branch[0] for branch in starts} == set(PROMPT)
    assert Branches([], 6, 6).tokens == []


def test_the_global_dice_are_not_touched():
    random.seed(1)
    python, torchs = random.getstate(), torch.get_rng_state()
    branches = Branches(PROMPT, 6, 3)
    for _ in range(5):
        branches.ride(DraftTree.of_root(1), 9)
        branches.take([5] * len(branches.pairs(1)))
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), torchs)


def test_two_requests_draw_alike():
    assert Branches(PROMPT, 6, 3).tokens == Branches(PROMPT, 6, 3).tokens


@given(
    trees(max_nodes=8), st.lists(st.lists(st.integers(20, 29), min_size=1, max_size=4), max_size=3)
)
def test_a_branch_sees_the_root_and_itself_and_nobody_sees_it(tree, tokens):
    queries = branches_of(*tokens).ride(tree, 99)
    tree.check()  # It is left alone.
    width = len(queries.tokens)
    assert width == len(tree) + sum(map(len, tokens))
    (sees,) = ancestors([queries.parents], width)
    (trees_own,) = ancestors([tree.parents], len(tree))
    assert (sees[: len(tree), : len(tree)] == trees_own).all()
    assert not sees[: len(tree), len(tree) :].any()
    first = len(tree)
    for branch in tokens:
        for i in range(len(branch)):
            seen = set(sees[first + i].nonzero()[0])
            assert seen == {0, *range(first, first + i + 1)}
            assert queries.depths[first + i] == i + 1
        assert queries.tokens[first : first + len(branch)] == branch
        first += len(branch)


def test_every_sub_sequence_yields_a_gram_and_the_last_draft_is_appended():
    branches = branches_of([1, 2, 3, 4, 5], max_length=9)
    branches.ride(DraftTree.of_root(0), 9)
    grams = branches.take([12, 13, 14, 15, 16])
    assert grams == [(1, 12), (1, 2, 13), (1, 2, 3, 14), (2, 3, 4, 15), (3, 4, 5, 16)]
    assert max(map(len, grams)) == GRAM_LENGTH
    assert branches.tokens == [[1, 2, 3, 4, 5, 16]]
    assert branches.pairs(0) == []


def test_each_branch_takes_its_own_answers():
    branches = branches_of([1, 2], [3])
    branches.ride(DraftTree.of_root(0), 9)
    assert branches.pairs(0) == [(0, 1), (1, 2), (0, 3)]
    assert branches.take([5, 6, 7]) == [(1, 5), (1, 2, 6), (3, 7)]
    assert branches.tokens == [[1, 2, 6], [3, 7]]


def test_of_two_branches_that_say_the_same_one_starts_over():
    branches = branches_of([1, 2], [9, 2], max_length=2)
    branches.ride(DraftTree.of_root(0), 9)
    branches.take([5, 6, 7, 6])
    assert branches.tokens[0] == [2, 6]
    assert branches.tokens[1] in ([token] for token in PROMPT)


@pytest.mark.parametrize("max_depth", [0, 1, 2])
def test_nothing_stands_where_the_text_can_not_reach(max_depth):
    branches = branches_of([1, 2, 3], [4])
    queries = branches.ride(DraftTree.of_root(0), max_depth)
    assert max(queries.depths) <= max_depth
    said = list(range(50, 50 + len(branches.pairs(0))))
    assert len(branches.take(said)) == len(said)


def test_without_riding_nothing_is_taken():
    branches = branches_of([1, 2])
    assert branches.take([]) == []
    assert branches.tokens == [[1, 2]]


def test_it_counts_the_drafts_that_only_a_branch_had_foreseen():
    branches = branches_of([1, 2])
    assert branches.num_queries(9) == 2
    branches.ride(DraftTree.of_root(0), 9)
    branches.take([5, 6])
    tree = DraftTree.of_root(1)
    for parent, token, source in ((0, 5, "lut"), (1, 2, "lut"), (2, 6, "context"), (2, 7, "lut")):
        tree.add(parent, token, 0.5, (Evidence(source),))
    branch_knew = StepRecord(row=0, tree=tree, path=[0, 1, 2, 4], committed_ids=[5, 2, 7, 9])
    assert branches.num_foreseen(branch_knew) == 1  # 1 5, which nobody else told
    text_knew = StepRecord(row=0, tree=tree, path=[0, 1, 2, 3], committed_ids=[5, 2, 6, 9])
    assert branches.num_foreseen(text_knew) == 1  # 2 6 too, but the context had it
