"""Where a cursor stands in a prediction, whatever the text makes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.ranking import Ranking
from selfspec.draft.sources import RowStart
from selfspec.draft.sources.following import Following, FollowingCursor, Prediction
from selfspec.draft.tree import TreeGrower
from selfspec.records import DraftTree, StepRecord
from tests.strategies import candidates_of, path_of

LONG = list(range(100, 140))


def cursor_behind(prediction: Sequence[int], text: Sequence[int]) -> FollowingCursor:
    cursor = Prediction(prediction).open(RowStart(prompt_ids=[]))
    tree = DraftTree.of_root(0)
    cursor.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=list(text)))
    return cursor


def named(cursor: FollowingCursor, state: Following | None = None) -> list[int]:
    return [each.token for each in candidates_of(cursor, state or cursor.root())]


def first_trust(cursor: FollowingCursor) -> int:
    return candidates_of(cursor, cursor.root())[0].evidence.match_length


def test_equal_text_is_followed_to_the_end_with_growing_trust():
    trust = [first_trust(cursor_behind(LONG, LONG[:end])) for end in range(len(LONG))]
    assert trust == sorted(trust)
    assert trust[-1] == 40
    for end in range(4, len(LONG)):
        assert named(cursor_behind(LONG, LONG[:end])) == [LONG[end]]
    assert named(cursor_behind(LONG, LONG)) == []


def test_behind_a_deviation_there_are_several_ways_on():
    """Tokens were inserted, or replaced as many, or one."""
    assert named(cursor_behind(LONG, [*LONG[:10], 5])) == [110, 111]
    assert named(cursor_behind(LONG, [*LONG[:10], 5, 6, 7])) == [110, 113, 111]


@pytest.mark.parametrize(("share", "least"), [(0.5, 1.8), (0.8, 3.5)])
def test_a_prediction_that_is_right_here_and_there_is_followed(share, least):
    """A chain of n nodes, each right with chance p, brings (1 - p^n) / (1 - p) tokens a step."""
    dice, num_tokens, num_steps = random.Random(1), 0, 0
    for _ in range(12):
        text = [dice.randrange(50_000) for _ in range(128)]
        prediction = [token if dice.random() < share else 50_000 + token for token in text]
        cursor, calibration = cursor_behind(prediction, []), Calibration()
        grower = TreeGrower([cursor], SpecConfig(), Ranking(calibration.probability))
        while text:
            tree = grower.grow(0, 8)
            path = path_of(tree, text)
            record = StepRecord(row=0, tree=tree, path=path, committed_ids=text[: len(path)])
            calibration.observe(record)
            cursor.observe(record)
            text = text[len(path) :]
            num_tokens, num_steps = num_tokens + len(path), num_steps + 1
    assert num_tokens / num_steps > least


REPLACED = [*LONG[:10], 5, *LONG[11:]]
INSERTED = [*LONG[:10], 5, 6, 7, 8, 9, 5, 6, 7, 8, 9, *LONG[10:]]
DELETED = [*LONG[:10], *LONG[30:]]


@pytest.mark.parametrize(("text", "found"), [(REPLACED, 12), (INSERTED, 21), (DELETED, 11)])
def test_behind_a_change_the_text_is_found_again(text, found):
    for end in range(found, len(text)):
        assert named(cursor_behind(LONG, text[:end]))[0] == text[end]


def test_longest_match_first_then_forward_then_nearest():
    prediction = [0, 0, 0, 1, 2, 50, 9, 2, 60, 7, 7, 7, 7, 9, 2, 61, 3, 2, 62]
    cursor = cursor_behind(prediction, [9, 2])
    assert named(cursor)[:2] == [60, 61], "both match two tokens"
    behind = cursor_behind([*LONG[:8], 70, *LONG[8:16], 70, 71], LONG[:16])
    assert named(behind, behind.follow(behind.root(), 70))[0] == 71


def test_a_common_token_costs_no_more_in_a_long_prediction():
    cursor = cursor_behind([7] * 50_000, [8, 7])
    assert len(cursor.root().matches) <= 4


@given(
    st.lists(st.integers(0, 5), max_size=30),
    st.lists(st.integers(0, 5), max_size=20),
    st.lists(st.integers(0, 5), max_size=8),
)
def test_below_a_node_the_cursor_stands_as_if_the_drafts_were_committed(prediction, text, drafts):
    cursor, ahead = cursor_behind(prediction, text), cursor_behind(prediction, text + drafts)
    state = cursor.root()
    for token in drafts:
        state = cursor.follow(state, token)
    assert state == ahead.root()
    tokens = named(cursor, state)
    assert len(tokens) == len(set(tokens))
    assert set(tokens) <= set(prediction)
