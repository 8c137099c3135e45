"""The context cache equals a plain dict of lists, whatever it takes in, and never outgrows it."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from selfspec.draft.sources import RowStart
from selfspec.papers.self_draft import ContextCache
from selfspec.records import DraftTree, StepRecord

MAX_KEYS, MAX_DRAFTS = 3, 4


def committed(token: int) -> StepRecord:
    return StepRecord(row=0, tree=DraftTree.of_root(0), path=[0], committed_ids=[token])


@mock.patch("selfspec.papers.self_draft._MAX_KEYS", MAX_KEYS)
@mock.patch("selfspec.papers.self_draft._MAX_DRAFTS", MAX_DRAFTS)
@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=4), max_size=40))
def test_it_holds_the_freshest(grams: list[list[int]]) -> None:
    cursor = ContextCache().open(RowStart(prompt_ids=[1]))
    plain: dict[int, list[tuple[int, ...]]] = {}
    for gram in grams:
        key, draft = gram[0], tuple(gram[1:])
        cursor.keep(tuple(gram))
        cursor.observe(committed(key))
        held = [draft, *(other for other in plain.pop(key, []) if other != draft)]
        plain[key] = held[:MAX_DRAFTS]  # Now the last of the dict: the freshest key.
        if len(plain) > MAX_KEYS:
            del plain[next(iter(plain))]
        assert cursor.root() == plain.get(key, [])


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
