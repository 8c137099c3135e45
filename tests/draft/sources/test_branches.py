"""Branches are nodes beside the tree, yield all their n-grams, and leave the global dice alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.draft.sources.branches import Branches
from selfspec.draft.sources.grams import GRAM_LENGTH
from selfspec.records import DraftTree, Gram, StepRecord, TopK
from tests.strategies import trees

PROMPT = [11, 12, 13]
ROOM = 99


def branches_of(*tokens: list[int], max_length: int = 4) -> Branches:
    """Branches that stand where a test wants them."""
    branches = Branches(PROMPT, len(tokens), max_length)
    branches.tokens = [list(branch) for branch in tokens]
    return branches


def answered(branches: Branches, tree: DraftTree, said: dict[int, int]) -> list[Gram]:
    """The n-grams of a step in which the model says `said` behind each of some tokens, else 0."""
    ids = np.array([[said.get(token, 0)] for token in tree.tokens], np.int32)
    record = StepRecord(
        row=0, tree=tree, path=[0], committed_ids=[9], top=TopK(ids, np.ones(ids.shape, np.float16))
    )
    branches.observe(record)
    return list(record.grams)


def test_they_start_with_a_token_of_the_prompt_and_two_requests_draw_alike():
    starts = Branches(PROMPT, 40, 6).tokens
    assert all(len(branch) == 1 for branch in starts)
    assert {branch[0] for branch in starts} == set(PROMPT)
    assert starts == Branches(PROMPT, 40, 6).tokens
    assert Branches([], 6, 6).tokens == []


def test_the_global_dice_are_not_touched():
    random.seed(1)
    python, torchs = random.getstate(), torch.get_rng_state()
    branches = Branches(PROMPT, 6, 3)
    for _ in range(5):
        tree = DraftTree.of_root(1)
        branches.hang(tree, 9, ROOM)
        answered(branches, tree, {})
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), torchs)


@given(
    trees(max_nodes=8), st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=4), max_size=3)
)
def test_a_branch_is_a_chain_below_the_root_that_shares_what_is_there(tree, tokens):
    before, branches = len(tree), branches_of(*tokens)
    kept = (list(tree.tokens), list(tree.parents), list(tree.scores))
    branches.hang(tree, 9, ROOM)
    tree.check()
    assert (tree.tokens[:before], tree.parents[:before], tree.scores[:before]) == kept
    assert not any(tree.scores[before:])
    for branch in tokens:
        node = 0
        for token in branch:
            node = tree.children[node][token]


def test_every_sub_sequence_yields_a_gram_and_the_last_draft_is_appended():
    tree, branches = DraftTree.of_root(0), branches_of([1, 2, 3, 4, 5], max_length=9)
    branches.hang(tree, 9, ROOM)
    grams = answered(branches, tree, {token: token + 11 for token in range(9)})
    assert grams == [(1, 12), (1, 2, 13), (1, 2, 3, 14), (2, 3, 4, 15), (3, 4, 5, 16)]
    assert max(map(len, grams)) == GRAM_LENGTH
    assert branches.tokens == [[1, 2, 3, 4, 5, 16]]


def test_each_branch_takes_its_own_answers_wherever_they_stand():
    tree = DraftTree.of_root(0)
    tree.add(tree.add(0, 7, 0.5), 1, 0.4)
    tree.add(0, 1, 0.3)  # The first branch begins with a node of the tree.
    branches = branches_of([1, 2], [3])
    branches.hang(tree, 9, ROOM)
    assert len(tree) == 4 + 2
    assert answered(branches, tree, {1: 5, 2: 6, 3: 8}) == [(1, 5), (1, 2, 6), (3, 8)]
    assert branches.tokens == [[1, 2, 6], [3, 8]]


def test_of_two_branches_that_say_the_same_one_starts_over():
    tree, branches = DraftTree.of_root(0), branches_of([1, 2], [9, 2], max_length=2)
    branches.hang(tree, 9, ROOM)
    answered(branches, tree, {2: 6})
    assert branches.tokens[0] == [2, 6]
    assert branches.tokens[1] in ([token] for token in PROMPT)


@pytest.mark.parametrize("max_depth", [0, 1, 2])
def test_nothing_stands_where_the_text_can_not_reach(max_depth):
    tree, branches = DraftTree.of_root(0), branches_of([1, 2, 3], [4])
    branches.hang(tree, max_depth, ROOM)
    assert max(tree.depths) <= max_depth
    assert len(answered(branches, tree, {})) == len(tree) - 1


def test_what_does_not_fit_stays_as_it_is():
    tree, branches = DraftTree.of_root(0), branches_of([1, 2], [3, 4, 5], [6])
    branches.hang(tree, 9, 4)
    assert tree.tokens == [0, 1, 2]
    answered(branches, tree, {2: 7})
    assert branches.tokens == [[1, 2, 7], [3, 4, 5], [6]]
