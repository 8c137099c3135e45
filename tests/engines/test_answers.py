"""Answers of other rows as a source: the newest place behind a few tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from selfspec.engines import answers
from selfspec.engines.answers import AnswersCursor, AnswersSource
from selfspec.records import DraftTree, StepRecord
from tests.strategies import texts


def write(cursor: AnswersCursor, *token_ids: int) -> None:
    tree = DraftTree.of_root(0)
    cursor.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=list(token_ids)))


def named(cursor: AnswersCursor, *drafts: int) -> int | None:
    """What the cursor names behind some drafts."""
    state = cursor.root()
    for token in drafts:
        state = cursor.follow(state, token)
    return next((token for token, _ in cursor.expand(state)), None)


def test_another_answer_is_found_and_followed():
    source = AnswersSource()
    write(source.open([], learns=True), 1, 2, 3, 4, 5, 6, 7)
    cursor = source.open([], learns=True)
    write(cursor, 9, 1, 2, 3)
    assert named(cursor) is None
    write(cursor, 4)
    assert named(cursor) == 5
    assert named(cursor, 5) == 6
    assert named(cursor, 5, 6, 7) is None
    assert named(cursor, 8) is None


def test_a_longer_match_is_kept_beside_a_newer_one():
    source = AnswersSource()
    write(source.open([], learns=True), 0, 1, 2, 3, 4, 5)
    cursor = source.open([], learns=True)
    write(cursor, 0, 1, 2, 3)
    write(source.open([], learns=True), 8, 1, 2, 3, 4, 6)
    write(cursor, 4)
    assert named(cursor) == 5


def test_the_newest_of_several_answers_is_named():
    source = AnswersSource()
    for last in (5, 6):
        write(source.open([], learns=True), 1, 2, 3, 4, last)
    cursor = source.open([], learns=True)
    write(cursor, 1, 2, 3, 4)
    assert named(cursor) == 6


def test_an_answer_that_repeats_itself_is_found_in_itself():
    cursor = AnswersSource().open([], learns=True)
    write(cursor, 1, 2, 3, 4, 5, 1, 2, 3, 4)
    assert named(cursor) == 5


@given(texts(), texts())
def test_what_is_kept_names_the_same(first, second):
    source, again = AnswersSource(), AnswersSource()
    for text in (first, second):
        write(source.open([], learns=True), *text)
    again.restore(source.arrays() or {"tokens": np.zeros(0, np.int32)})
    for text in (first, second):
        key = tuple(text[-answers._KEY_LENGTH :])
        found, kept = source.find(key), again.find(key)
        assert list(kept.answer)[kept.position :] == list(found.answer)[found.position :]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(answers, "_MAX_KEYS", 10)
    source = AnswersSource()
    write(source.open([], learns=True), *range(50))
    assert len(source._places) == 10
    assert source.find((45, 46, 47, 48)).length
