"""A map is asked at the end of the text alone, and as long as it pays."""

from __future__ import annotations

from typing import Any

from selfspec.cost import SourceWorth
from selfspec.draft.sources.map_cursor import MapCursor
from selfspec.records import DraftTree, Evidence, Likely, StepRecord
from tests.strategies import candidates_of


class ScriptedMap:
    """Names the same tokens always, and keeps what it is shown."""

    def __init__(self, likely: Likely) -> None:
        self.shown: list[Any] = []
        self.has_begun = False
        self._likely = likely

    def begin(self) -> None:
        self.has_begun = True

    def name(self, ids: Any) -> None:
        self.shown.append(list(ids))

    def learn(self, ids: Any, parents: Any, path: Any, states: Any) -> None:
        self.shown.append((ids, parents, path, states))

    def skip(self) -> None:
        self.shown.append("skip")

    def likely(self, token: int, num: int) -> Likely:
        return self._likely[:num]


def cursor_of(likely: Likely, price: float = 0.0) -> tuple[MapCursor, ScriptedMap]:
    state_map = ScriptedMap(likely)
    return MapCursor(state_map, 3, SourceWorth(), lambda seconds: price), state_map


def first(cursor: MapCursor, token: int = 4) -> None:
    record = StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[token])
    cursor.observe(record)


def test_it_stands_at_the_root_after_the_first_token():
    cursor, _ = cursor_of([(5, 0.6), (6, 0.3), (7, 1e-9), (8, 0.0)])
    assert cursor.expand(cursor.root()) == []
    first(cursor)
    candidates = candidates_of(cursor, cursor.root())
    assert [(c.token, c.evidence) for c in candidates] == [
        (5, Evidence("map", probability_bin=0)),
        (6, Evidence("map", probability_bin=1)),
        (7, Evidence("map", probability_bin=6)),
    ]
    assert cursor.follow(cursor.root(), 5) is None


def test_it_learns_trees_whose_states_are_known():
    cursor, state_map = cursor_of([])
    first(cursor)
    assert state_map.shown == []
    tree = DraftTree.of_root(4)
    tree.add(0, 5, 0.5)
    cursor.states = "states"
    record = StepRecord(row=0, tree=tree, path=[0, 1], committed_ids=[5, 6])
    cursor.observe(record)
    cursor.observe(record)
    assert state_map.shown == [([4, 5], [-1, 0], [0, 1], "states"), "skip"]


def test_what_costs_more_than_it_brings_is_paused_and_tried_again():
    cursor, _ = cursor_of([(5, 0.6)], price=9.0)
    first(cursor)
    asked = []
    for _ in range(120):
        asked.append(bool(cursor.expand(cursor.root())))
        first(cursor)
    assert asked[:12] == [True] * 12
    assert asked[12:76] == [False] * 64
    assert all(asked[76:88])
    assert not any(asked[88:])


def test_a_prompt_is_not_learned_while_it_is_paused():
    worth = SourceWorth()
    for _ in range(12):
        worth.observe(seconds=1.0, tokens=0.0)
    state_map = ScriptedMap([])
    MapCursor(state_map, 3, worth, lambda seconds: seconds)
    assert not state_map.has_begun
    MapCursor(state_map, 3, SourceWorth(), lambda seconds: seconds)
    assert state_map.has_begun


def test_what_costs_nothing_is_never_paused():
    cursor, _ = cursor_of([(5, 0.6)])
    first(cursor)
    for _ in range(120):
        assert cursor.expand(cursor.root())
        first(cursor)
