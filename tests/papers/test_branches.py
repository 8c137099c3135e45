"""Self-Draft's branches are nodes beside the tree and yield drafts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.errors import ConfigError
from selfspec.papers.self_draft import Branches
from selfspec.records import DraftTree, Gram, StepRecord, TopK
from tests.strategies import trees

PROMPT = [11, 12, 13]
ROOM = 99


def branches_of(*tokens: list[int], length: int = 4, gram_length: int = 2) -> Branches:
    """Branches that stand where a test wants them."""
    branches = Branches(6, length, gram_length).open(PROMPT, learns=True)
    branches.tokens = [list(branch) for branch in tokens]
    return branches


def answered(branches: Branches, tree: DraftTree, said: dict[int, int]) -> list[Gram]:
    """The drafts of a step in which the model says `said` behind each of some tokens, else 0."""
    ids = np.array([[said.get(token, 0)] for token in tree.tokens], np.int32)
    record = StepRecord(
        row=0, tree=tree, path=[0], committed_ids=[9], top=TopK(ids, np.ones(ids.shape, np.float16))
    )
    branches.observe(record)
    return list(record.grams)


def test_they_start_with_tokens_of_the_prompt_and_two_requests_draw_alike():
    shape = Branches(40, 6)
    starts = shape.open(PROMPT, learns=True).tokens
    assert all(len(branch) == 3 for branch in starts)
    assert {token for branch in starts for token in branch} == set(PROMPT)
    assert starts == shape.open(PROMPT, learns=True).tokens
    assert shape.open([], learns=True).tokens == shape.open(PROMPT, learns=False).tokens == []
    assert shape.num_beside == 240


def test_the_global_dice_are_not_touched():
    random.seed(1)
    python, torchs = random.getstate(), torch.get_rng_state()
    branches = Branches(6, 3).open(PROMPT, learns=True)
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


def test_a_full_branch_yields_its_sub_sequences_with_their_successors():
    tree, branches = DraftTree.of_root(0), branches_of([1, 2, 3, 4], [7, 8])
    branches.hang(tree, 9, ROOM)
    grams = answered(branches, tree, {token: token + 11 for token in range(9)})
    assert grams == [(1, 2, 13), (2, 3, 14), (3, 4, 15)]
    assert branches.tokens == [[2, 3, 4, 15], [7, 8, 19]]  # The foremost token of a full one goes.


def test_each_branch_takes_its_own_answers_wherever_they_stand():
    tree = DraftTree.of_root(0)
    tree.add(tree.add(0, 7, 0.5), 1, 0.4)
    tree.add(0, 1, 0.3)  # The first branch begins with a node of the tree.
    branches = branches_of([1, 2], [3, 4], length=2)
    branches.hang(tree, 9, ROOM)
    assert len(tree) == 4 + 3
    assert answered(branches, tree, {1: 5, 2: 6, 4: 8}) == [(1, 2, 6), (3, 4, 8)]
    assert branches.tokens == [[2, 6], [4, 8]]


@pytest.mark.parametrize("max_depth", [0, 1, 2])
def test_nothing_stands_where_the_text_can_not_reach(max_depth):
    tree, branches = DraftTree.of_root(0), branches_of([1, 2, 3], [4])
    branches.hang(tree, max_depth, ROOM)
    assert max(tree.depths) <= max_depth
    answered(branches, tree, {})


def test_what_does_not_fit_stays_as_it_is():
    tree, branches = DraftTree.of_root(0), branches_of([1, 2], [3, 4, 5], [6])
    branches.hang(tree, 9, 4)
    assert tree.tokens == [0, 1, 2]
    answered(branches, tree, {2: 7})
    assert branches.tokens == [[1, 2, 7], [3, 4, 5], [6]]


def test_nothing_is_drafted_until_they_are_full():
    branches = Branches(2, 3).open(PROMPT, learns=True)
    for _ in range(3):
        assert branches.score(0.9, 1, 0) is None
        answered(branches, DraftTree.of_root(0), {})
    assert branches.score(0.9, 1, 0) == 0.9
    assert Branches(2, 3, fills=False).open(PROMPT, learns=True).score(0.9, 1, 0) == 0.9


@pytest.mark.parametrize("name", ["num_branches", "length", "gram_length"])
def test_numbers_are_checked(name):
    with pytest.raises(ConfigError, match=name):
        Branches(**{name: 0})
