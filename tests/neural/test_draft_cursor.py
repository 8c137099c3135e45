"""A draft model's cursor: which paths it reads, and what it names after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.config import SpecConfig
from selfspec.cost import Budget
from selfspec.draft.calibration import Calibration
from selfspec.draft.ranking import Ranking
from selfspec.draft.sources import RowStart
from selfspec.draft.sources.worth import SourceWorth
from selfspec.draft.tree import TreeGrower
from selfspec.neural.draft_cursor import FULL_GAIN, DraftCursor, Path, ranked, with_margins
from selfspec.records import (
    DRAFT_MODEL,
    MAX_BIN,
    DraftTree,
    Draws,
    Evidence,
    Likely,
    StepRecord,
    TimeBudget,
)
from tests.strategies import ScriptedCursor, check_tree


class CountingText:
    """Behind each token n come n + 1 and n + 2; writes down which paths are read."""

    def __init__(self, last: int = 10, most: int = 99) -> None:
        self.last, self._most = last, most
        self.log: list[Path] = []

    def prepare(self, budget: TimeBudget) -> None:
        """There is nothing to read."""

    def read(self, path: Path) -> torch.Tensor | None:
        if len(path) > self._most:
            return None
        self.log.append(path)
        logits = torch.zeros(100)
        last = (self.last, *path)[-1]
        logits[[last + 1, last + 2]] = torch.tensor([9.0, 8.0])
        return logits

    def observe(self, committed: Any) -> None:
        self.last = [self.last, *committed][-1]


class Price(Budget):
    """Whatever takes time must bring this many tokens."""

    def __init__(self, least: float) -> None:
        self.least = least

    def break_even_tokens(self, seconds: float) -> float:
        return self.least


def cursor_over(
    text: CountingText, least: float = 0.0, worth: SourceWorth | None = None
) -> DraftCursor:
    row = RowStart(prompt_ids=[text.last], budget=Price(least))
    return DraftCursor(text, row, 3, worth or SourceWorth(FULL_GAIN))


def grown(cursor: DraftCursor, token: int, max_nodes: int, *others: ScriptedCursor) -> DraftTree:
    cursor.prepare()
    grower = TreeGrower([*others, cursor], SpecConfig(), Ranking(Calibration().probability))
    tree = grower.grow(token, max_nodes, 9)
    check_tree(tree)
    return tree


def step(cursor: DraftCursor, tree: DraftTree, path: list[int], committed: list[int]) -> None:
    cursor.observe(StepRecord(row=0, tree=tree, path=path, committed_ids=committed))


def test_a_chain_with_near_misses() -> None:
    text = CountingText()
    tree = grown(cursor_over(text), 10, 40)
    assert text.log[:3] == [(), (11,), (11, 12)]
    assert {10, 11, 12} <= set(tree.tokens)
    assert {tree.tokens[node] for node in tree.children[0].values()} == {11, 12}
    assert {kind.source for kinds in tree.evidence[1:] for kind in kinds} == {DRAFT_MODEL}


def test_what_it_does_not_name_is_unlikely_where_it_has_read_and_nowhere_else() -> None:
    table = ScriptedCursor({10: [(50, 0.9)], 50: [(51, 0.9)]}, root=10, name="table")
    tree = grown(cursor_over(CountingText(most=0)), 10, 40, table)
    kinds = {token: tree.evidence[node] for node, token in enumerate(tree.tokens)}
    assert [(kind.source, kind.rank) for kind in kinds[50]] == [("table", 1), (DRAFT_MODEL, 0)]
    assert [kind.source for kind in kinds[51]] == ["table"]


def test_it_reads_paths_that_are_likely_enough() -> None:
    nums = []
    for least in (1.1, 0.9, 0.7, 0.5):
        text = CountingText()
        grown(cursor_over(text, least), 10, 20)
        nums.append(len(text.log))
    assert nums[:2] == [0, 1]
    assert 1 < nums[2] < nums[3] < 19


def test_what_was_named_after_the_new_text_stays() -> None:
    text = CountingText()
    cursor = cursor_over(text, 0.5)
    tree = grown(cursor, 10, 9)
    step(cursor, tree, [0, 1], [11, 12])
    text.log.clear()
    cursor.read((), 1.0)
    assert [token for token, _ in cursor.expand(())] == [13, 14]
    assert text.log == []
    step(cursor, tree, [0], [50])
    assert cursor.expand(()) == []


def test_a_model_that_is_wrong_is_left_alone_in_all_texts() -> None:
    """It is asked until that is known, which takes some 40 tokens, and again after 256 steps."""
    worth, text = SourceWorth(FULL_GAIN), CountingText()
    cursor = cursor_over(text, 0.5, worth)

    def asked(num_steps: int) -> int:
        num_asked = 0
        for _ in range(num_steps):
            text.log.clear()
            tree = grown(cursor, 10, 2)
            step(cursor, tree, [0], [90])
            text.last = 10
            num_asked += len(text.log) > 0
        return num_asked

    assert 20 < asked(60) < 60
    other = CountingText()
    grown(cursor_over(other, 0.5, worth), 10, 4)
    assert other.log == []
    assert asked(180) == 0
    assert asked(100) > 0


def test_a_model_that_is_right_is_asked_on() -> None:
    cursor = cursor_over(text := CountingText(), 0.5)
    for _ in range(300):
        tree = grown(cursor, text.last, 2)
        assert text.last + 1 in tree.tokens
        step(cursor, tree, [0, 1], [text.last + 1, 11])


class Ranked(Draws):
    def ranked(self, logits: Any, depth: int) -> Likely:
        return [(3, 8.0), (1, 4.0), (2, 1e-9)]


def test_the_margin_is_the_evidence() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -9.0])
    assert with_margins(ranked(logits, 3, Draws(), 0), is_drawn=False) == [
        (1, Evidence(DRAFT_MODEL, 6)),
        (2, Evidence(DRAFT_MODEL, 0, 2, probability_bin=4)),
        (0, Evidence(DRAFT_MODEL, 0, 3, probability_bin=MAX_BIN)),
    ]
    assert with_margins(ranked(logits, 3, Ranked(), 0), is_drawn=True) == [
        (3, Evidence(DRAFT_MODEL, 6, 1, 1)),
        (1, Evidence(DRAFT_MODEL, 0, 2, 1, 4)),
    ]
    nothing = ranked(torch.full((4,), torch.nan), 2, Draws(), 0)
    assert with_margins(nothing, is_drawn=False)
    assert ranked(logits, 2, Draws(), 0)[1][1] == pytest.approx(0.3679, rel=1e-3)
