"""Heads are asked from the end of the text on, and as long as it pays."""

from __future__ import annotations

from typing import Any

import pytest

from selfspec.cost import Budget, CostCurve, MeasuredBudget
from selfspec.draft.sources.worth import SourceWorth
from selfspec.neural import heads
from selfspec.neural.heads import HeadCursor, HeadSource
from selfspec.records import DraftTree, Evidence, Likely, StepRecord
from tests.strategies import candidates_of


class ScriptedText:
    """Names the same tokens always, and keeps what it is shown."""

    def __init__(self, likely: Likely) -> None:
        self.shown: list[Any] = []
        self.has_begun = False
        self._likely = likely

    def begin(self) -> None:
        self.has_begun = True

    def learn(self, ids: Any, path: Any, states: Any) -> None:
        self.shown.append((ids, path, states))

    def skip(self, ids: Any) -> None:
        self.shown.append("skip")

    def chain(self, token: int, num: int) -> list[Likely]:
        return [self._likely[:num]]


def asked_always() -> HeadSource:
    return HeadSource(None, 4, SourceWorth())


def cursor_of(likely: Likely, asked: HeadSource | None = None) -> tuple[HeadCursor, ScriptedText]:
    reader = ScriptedText(likely)
    cursor = HeadCursor(reader, 3, asked or asked_always(), Budget())
    cursor.prepare()
    return cursor, reader


def first(cursor: HeadCursor, token: int = 4) -> None:
    record = StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[token])
    cursor.observe(record)


def test_it_stands_at_the_root_after_the_first_token():
    cursor, _ = cursor_of([(5, 0.6), (6, 0.3), (7, 1e-9), (8, 0.0)])
    assert cursor.expand(cursor.root()) == []
    first(cursor)
    candidates = candidates_of(cursor, cursor.root())
    assert [(c.token, c.evidence) for c in candidates] == [
        (5, Evidence("heads", probability_bin=0)),
        (6, Evidence("heads", probability_bin=1)),
        (7, Evidence("heads", probability_bin=6)),
    ]
    assert cursor.follow(cursor.root(), 5) is None


def test_it_learns_trees_whose_states_are_known():
    cursor, reader = cursor_of([])
    first(cursor)
    assert reader.shown == []
    tree = DraftTree.of_root(4)
    tree.add(0, 5, 0.5)
    record = StepRecord(row=0, tree=tree, path=[0, 1], committed_ids=[5, 6], states="states")
    cursor.observe(record)
    record.states = None
    cursor.observe(record)
    assert reader.shown == [([4, 5], [0, 1], "states"), "skip"]


def test_while_it_is_paused_it_is_not_asked_and_learns_no_prompt():
    reader, asked = ScriptedText([(5, 0.6)]), asked_always()
    cursor = HeadCursor(reader, 3, asked, Budget())
    for wanted, has_begun in ((False, False), (True, True), (False, True)):
        asked.is_wanted = wanted
        cursor.prepare()
        first(cursor)
        assert (cursor.root() is not None) == cursor.wants_states == wanted
        assert reader.has_begun == has_begun


def test_what_learning_the_prompt_takes_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, after plain steps were timed and drafts have saved a plain step."""
    budget, reader, ticks = MeasuredBudget(CostCurve.unknown(0.2)), ScriptedText([]), range(99)
    monkeypatch.setattr(heads, "perf_counter", map(float, ticks).__next__)
    cursor = HeadCursor(reader, 3, asked_always(), budget)
    first(cursor)
    cursor.prepare()
    assert not reader.has_begun
    assert cursor.root() is None
    budget.curve.refine(1, 2.0)
    budget.curve.refine(1, 2.0)
    budget.ledger.observe(0.0, 0.9)
    cursor.prepare()
    assert not reader.has_begun
    budget.ledger.observe(0.0, 0.2)
    for _ in range(2):
        cursor.prepare()
        assert reader.has_begun
        assert cursor.root() is not None
        assert budget.ledger.may_lose() == pytest.approx(
            1.6, abs=0.05
        )  # It took half a plain step.


def test_heads_go_on_down_their_chain_and_are_credited_with_what_they_alone_name():
    reader, source = ScriptedText([]), asked_always()
    named: list[Likely] = [[(5, 0.98), (6, 0.01)], [(7, 0.5)], []]
    reader.chain = lambda *_: named  # type: ignore[method-assign]
    cursor = HeadCursor(reader, 3, source, Budget())
    cursor.prepare()
    first(cursor)
    root = cursor.root()
    (best, _), (_, other) = cursor.expand(root)
    assert (best, other) == (5, Evidence("heads", 0, probability_bin=6))
    assert cursor.follow(root, 6) is None
    below = cursor.follow(root, 5)
    assert cursor.expand(below) == [(7, Evidence("heads", 1, count_bin=0, probability_bin=1))]
    assert cursor.expand(cursor.follow(below, 7)) == []
    tree, seen = DraftTree.of_root(4), []
    source.worth.observe = lambda **took: seen.append(took["tokens"])  # type: ignore[method-assign]
    for number, names in enumerate([("heads", "lut"), ("heads",), ("lut",)]):
        tree.add(number, 5 + number, 0.5, tuple(Evidence(name) for name in names))
    cursor.observe(StepRecord(row=0, tree=tree, path=[0, 1, 2, 3], committed_ids=[5, 6, 7, 8]))
    assert seen == [2]
