"""Suffix matches equal brute force, at the end of the text and along every drafted span."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from selfspec.draft.sources import ContextSource, RowStart, context
from selfspec.draft.sources.context import ContextCursor
from selfspec.draft.sources.following import SURE
from tests.draft.sources.test_answers import committed
from tests.oracles import continuations, suffix_matches
from tests.strategies import candidates_of, texts

MOST = 8  # What the source remembers for one suffix.
MAX_MATCHES = 32  # The same where a test compares with a full search.


def cursor_behind(text: list[int], most: int = MAX_MATCHES) -> ContextCursor:
    with mock.patch.object(context, "_MOST_MATCHES", most):
        return ContextSource(8).open(RowStart(prompt_ids=text))


class ContextMachine(RuleBasedStateMachine):
    """Text grows by prompt and steps; the matches are always those of a full search."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[int] = []
        self.cursor = cursor_behind([])

    @precondition(lambda self: not self.text)
    @rule(text=texts(max_size=20))
    def prompt(self, text):
        self.text = list(text)
        self.cursor = cursor_behind(text)

    @precondition(lambda self: len(self.text) < MAX_MATCHES)
    @rule(tokens=texts(max_size=5))
    def step(self, tokens):
        tokens = tokens[: MAX_MATCHES - len(self.text)]
        self.text += tokens
        self.cursor.observe(committed(tokens))

    @precondition(lambda self: len(self.text) > 1)
    @rule(source=st.data())
    def copy_a_span(self, source):
        start = source.draw(st.integers(0, len(self.text) - 1))
        self.step(self.text[start : start + 6])

    @invariant()
    def matches_are_those_of_a_full_search(self):
        """A token to which a way on leads counts for more."""
        matches, lengths = dict(self.cursor.root().matches), dict(suffix_matches(self.text))
        assert matches.keys() == lengths.keys()
        for place, run in matches.items():
            assert run == lengths[place] or run >= max(SURE, lengths[place])

    @invariant()
    def candidates_are_ranked_by_length_and_then_by_frequency(self):
        matches = self.cursor.root().matches
        candidates = candidates_of(self.cursor, self.cursor.root())
        expected = {token: (length, num) for token, length, num in continuations(self.text)}
        assert [c.evidence.source for c in candidates] == ["context"] * len(candidates)
        if sorted(matches, reverse=True) != suffix_matches(self.text):
            return
        ranked = candidates[: len(expected)]
        assert {c.token for c in ranked} == expected.keys()
        assert [expected[c.token] for c in ranked] == sorted(expected.values(), reverse=True)
        for rank, candidate in enumerate(ranked, start=1):
            length, evidence = expected[candidate.token][0], candidate.evidence
            assert (evidence.rank, min(evidence.match_length, 4)) == (rank, min(length, 4))


TestContext = ContextMachine.TestCase
TestContext.settings = settings(max_examples=40, stateful_step_count=12)


@given(texts(max_size=24))
def test_a_drafted_token_narrows_the_matches_to_those_it_goes_on(text):
    """As a full search in the drafted text would find them, but for its own new tokens."""

    def check(drafted, state, depth):
        if depth == 3:
            return
        for candidate in candidates_of(cursor, state):
            longer = [*drafted, candidate.token]
            everywhere = suffix_matches([*text, *longer])
            copied = {p for p, n in everywhere if n > len(longer) and p <= len(text)}
            assert {place for place, _ in candidate.state.matches} >= copied
            check(longer, candidate.state, depth + 1)

    cursor = cursor_behind(text)
    check([], cursor.root(), 0)


def test_behind_a_token_that_others_named_stands_what_the_text_said_there():
    cursor = cursor_behind([5, 6, 7, 8, 6, 9, 5])
    place = cursor.follow(cursor.root(), 8)
    assert place.matches == ((4, 1),)
    assert [c.token for c in candidates_of(cursor, place)] == [6]
    assert candidates_of(cursor, cursor.follow(cursor.root(), 99)) == []


def test_memory_of_matches_is_bounded_and_fresh():
    cursor = cursor_behind([1, 2] * 500 + [1], MOST)
    assert len(cursor.root().matches) == MOST
    (candidate,) = candidates_of(cursor, cursor.root())
    assert candidate.token == 2
    assert len(candidate.state.matches) <= MOST


@pytest.mark.parametrize("is_prompt", [True, False])
def test_an_old_long_match_outlives_many_short_ones(is_prompt):
    """A token that came often since must not hide the one place that matches for long."""
    rare = [10, 11, 12, 13, 14, 15, 1, 77]
    text = rare + [1, 50] * (MOST + 8) + rare[:-1]
    cursor = cursor_behind(text if is_prompt else [], MOST)
    if not is_prompt:
        cursor.observe(committed(text))
    best = candidates_of(cursor, cursor.root())[0]
    assert best.token == 77
    assert cursor.root().matches[0][1] == 7
