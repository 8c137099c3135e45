"""The near misses of the last logits stand at the root, and nowhere else."""

from __future__ import annotations

import numpy as np

from selfspec.draft.sources import NearMissesSource, RowStart
from selfspec.draft.sources.near_misses import NearMissesCursor
from selfspec.records import DraftTree, StepRecord, TopK
from tests.strategies import candidates_of


def told(ids: list[list[int]], path: list[int], committed: list[int]) -> NearMissesCursor:
    """A cursor behind a step; `ids` are the likeliest tokens at each node."""
    tree = DraftTree.of_root(1)
    for node in range(1, len(ids)):
        tree.add(node - 1, 10 + node, 0.5**node)
    probabilities = np.array([[0.6, 0.2, 0.1, 0.05, 0.02, 0.01]] * len(ids), np.float16)
    top = TopK(np.array(ids, np.int32), probabilities[:, : len(ids[0])])
    cursor = NearMissesSource().open(RowStart(prompt_ids=[1]))
    cursor.observe(StepRecord(row=0, tree=tree, path=path, committed_ids=committed, top=top))
    return cursor


def test_before_the_model_has_spoken_there_are_none():
    cursor = NearMissesSource().open(RowStart(prompt_ids=[1, 2]))
    assert candidates_of(cursor, cursor.root()) == []


def test_the_chosen_token_is_no_runner():
    """Whichever it was: a sampler may have chosen the third."""
    cursor = told([[5, 6, 7, 8]], [0], [7])
    candidates = candidates_of(cursor, cursor.root())
    assert [c.token for c in candidates] == [5, 6, 8]
    assert [c.evidence.rank for c in candidates] == [1, 2, 3]
    assert [c.evidence.probability_bin for c in candidates] == [0, 2, 4]
    assert {c.evidence.source for c in candidates} == {"near_misses"}


def test_they_are_those_of_the_last_accepted_node():
    cursor = told([[5, 6], [7, 8], [3, 4]], [0, 1], [11, 7])
    assert [c.token for c in candidates_of(cursor, cursor.root())] == [8]


def test_nothing_stands_below_them():
    cursor = told([[5, 6, 7]], [0], [5])
    assert {c.state for c in candidates_of(cursor, cursor.root())} == {None}
    assert cursor.follow(cursor.root(), 9) is None
