"""The context cache keeps the freshest drafts of each first token."""

from __future__ import annotations

from selfspec.draft.sources import RowStart
from selfspec.papers import self_draft
from selfspec.papers.self_draft import ContextCache
from selfspec.records import DraftTree, StepRecord


def committed(token: int) -> StepRecord:
    return StepRecord(row=0, tree=DraftTree.of_root(0), path=[0], committed_ids=[token])


def test_it_holds_the_freshest(monkeypatch) -> None:
    monkeypatch.setattr(self_draft, "_MAX_DRAFTS", 2)
    cursor = ContextCache().open(RowStart(prompt_ids=[1]))
    for gram in [(1, 5), (1, 6, 7), (2, 5), (1, 5), (1, 8)]:
        cursor.keep(gram)
    assert cursor.root() == [(8,), (5,)]
    cursor.observe(committed(2))
    assert cursor.root() == [(5,)]
    cursor.observe(committed(3))
    assert cursor.root() == []


def test_a_draft_is_followed_to_its_end():
    cursor = ContextCache().open(RowStart(prompt_ids=[1]))
    cursor.keep((5, 6, 7))
    cursor.keep((5, 8, 9))
    cursor.observe(committed(5))
    root = cursor.root()
    assert [(token, kind.rank) for token, kind in cursor.expand(root)] == [(8, 1), (6, 2)]
    below = cursor.follow(root, 6)
    assert [token for token, _ in cursor.expand(below)] == [7]
    assert cursor.follow(below, 7) is None
    assert cursor.follow(root, 4) is None
