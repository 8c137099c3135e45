"""A draft model's cursor: what it reads and when, with a model of a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.config import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.sources.draft_model import DraftModelCursor
from selfspec.draft.tree import TreeGrower
from selfspec.records import DraftTree, Likely, StepRecord


class CountingText:
    """Behind each token n come n + 1 and n + 2; writes down what is read."""

    room = 100.0
    setting_up = 0.0

    def __init__(self) -> None:
        self.log: list[object] = []

    def pays_to_begin(self, num_tokens: int, num_left: float) -> bool:
        return num_tokens < num_left

    def extend(self, token_ids: Sequence[int]) -> Likely:
        self.log.append(("extend", list(token_ids)))
        return self.behind(token_ids[-1])

    def look(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[Likely]:
        self.log.append(("look", list(token_ids), list(parents)))
        return [self.behind(token) for token in token_ids]

    def keep(self, path: Sequence[int]) -> None:
        self.log.append(("keep", list(path)))

    def behind(self, token: int) -> Likely:
        return [(token + 1, 0.6), (token + 2, 0.3), (token + 3, 0.001)]


class Pace:
    """Says yes so many times."""

    def __init__(self, most: int = 99) -> None:
        self.most = most
        self.scores: list[Sequence[float]] = []
        self.readings: list[int] = []

    def pays_to_read(self, scores: Sequence[float]) -> bool:
        self.scores.append(scores)
        return len(self.scores) <= self.most

    def observe_reading(self, seconds: float, num_tokens: int, setting_up: float) -> None:
        self.readings.append(num_tokens)


def grown(cursor: DraftModelCursor, token: int, max_nodes: int, depth: int = 9) -> DraftTree:
    grower = TreeGrower([cursor], SpecConfig(), Calibration().probability)
    tree = grower.grow(token, max_nodes, depth)
    tree.check()
    return tree


def test_a_level_is_read_in_one_forward():
    text, pace = CountingText(), Pace()
    cursor = DraftModelCursor(text, [7, 8, 10], pace)
    tree = grown(cursor, 10, 6, depth=3)
    assert text.log[0] == ("extend", [7, 8, 10])
    assert text.log[1] == ("look", [11, 12], [0, 0])  # The second one waits, and may be next.
    assert tree.tokens[1:3] == [11, 12]
    assert tree.depths.count(2) > 0
    assert pace.scores[0] == [1.0]
    assert pace.scores[1] == sorted(pace.scores[1], reverse=True)
    assert pace.readings[0] == 2  # The prompt is not counted.
    assert {kind.source for kinds in tree.evidence[1:] for kind in kinds} == {"draft model"}


def test_what_was_accepted_is_not_read_again():
    text = CountingText()
    cursor = DraftModelCursor(text, [10], Pace())
    tree = grown(cursor, 10, 4)
    assert tree.tokens[1] == 11
    text.log.clear()
    cursor.observe(StepRecord(row=0, tree=tree, path=[0, 1], committed_ids=[11, 50]))
    grown(cursor, 50, 2)
    assert text.log == [("keep", [0, 1]), ("extend", [50])]
    text.log.clear()
    # The model's own next token was read too, as one that might be next.
    tree = grown(cursor, 50, 3)
    cursor.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[51]))
    assert cursor.expand(cursor.root())[0][0] == 52
    grown(cursor, 51, 2)
    assert text.log == [("look", [51, 52], [0, 0]), ("keep", [0, 1])]


def test_while_it_rests_the_text_piles_up():
    text = CountingText()
    cursor = DraftModelCursor(text, [10], Pace(most=0))
    for token in (20, 30):
        tree = grown(cursor, 10, 4)
        assert len(tree) == 1
        cursor.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[token]))
    assert text.log == []
    cursor._pace = Pace(most=1)
    tree = grown(cursor, 30, 4)
    assert text.log == [("extend", [10, 20, 30])]
    assert tree.tokens == [30, 31, 32]  # Their children would take another forward.


def test_a_prompt_is_read_only_if_what_is_left_to_write_is_worth_it():
    text = CountingText()
    cursor = DraftModelCursor(text, [7, 8, 10], Pace(), num_left=3)
    tree = grown(cursor, 10, 4)
    assert len(tree) == 1
    cursor.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[20]))
    assert text.log == []
    grown(DraftModelCursor(text, [7, 8, 10], Pace(), num_left=4), 10, 4)
    assert text.log[0] == ("extend", [7, 8, 10])


def test_a_model_without_positions_left_says_nothing():
    text = CountingText()
    text.room = 2
    assert len(grown(DraftModelCursor(text, [7, 8, 9], Pace()), 9, 4)) == 1
    assert text.log == []
