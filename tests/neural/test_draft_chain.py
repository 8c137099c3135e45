"""A draft model's cursor: what it reads and when, with a model of a few lines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from selfspec.config import SpecConfig
from selfspec.cost import Budget, CostCurve, MeasuredBudget
from selfspec.draft.calibration import Calibration
from selfspec.draft.ranking import Ranking
from selfspec.draft.sources.worth import SourceWorth
from selfspec.draft.tree import TreeGrower
from selfspec.neural import small_model
from selfspec.neural.small_model import DraftModelCursor
from selfspec.records import DraftTree, Evidence, Likely, StepRecord
from tests.strategies import ScriptedCursor, check_tree


class CountingText:
    """Behind each token n come n + 1 and n + 2; writes down what is read and forgotten."""

    def __init__(self, num_left: float = 100.0) -> None:
        self.num_left = num_left
        self.ids: list[int] = []
        self.log: list[object] = []

    def read(self, token_ids: Sequence[int], depth: int = 0) -> Likely:
        self.log.append(list(token_ids))
        self.ids += token_ids
        return [(self.ids[-1] + 1, 0.6), (self.ids[-1] + 2, 0.3), (self.ids[-1] + 3, 0.001)]

    def crop(self, num_tokens: int) -> None:
        del self.ids[len(self.ids) - num_tokens :]


class Price(Budget):
    """Whatever takes time must bring this many tokens."""

    def __init__(self, least: float) -> None:
        self.least = least

    def break_even_tokens(self, seconds: float) -> float:
        return self.least


def grown(
    cursor: DraftModelCursor, token: int, max_nodes: int, *others: ScriptedCursor
) -> DraftTree:
    grower = TreeGrower([*others, cursor], SpecConfig(), Ranking(Calibration().probability))
    tree = grower.grow(token, max_nodes, 9)
    check_tree(tree)
    return tree


def cursor_over(
    text: CountingText, prompt: list[int], least: float = 0.0, **limits: float
) -> DraftModelCursor:
    cursor = DraftModelCursor(text, prompt, Price(least), **limits)
    cursor.prepare()
    return cursor


def test_a_chain_with_runners_up() -> None:
    text = CountingText()
    tree = grown(cursor_over(text, [7, 8, 10]), 10, 10)
    assert text.log[:3] == [[7, 8, 10], [11], [12]]  # One token a forward.
    assert {10, 11, 12} <= set(tree.tokens)
    assert {tree.tokens[node] for node in tree.children[0].values()} == {11, 12}
    assert {kind.source for kinds in tree.evidence[1:] for kind in kinds} == {"draft model"}


def test_what_it_does_not_name_is_unlikely_where_it_has_read_and_nowhere_else() -> None:
    table = ScriptedCursor({10: [(50, 0.9)], 50: [(51, 0.9)]}, root=10, name="table")
    tree = grown(cursor_over(CountingText(), [10]), 10, 40, table)
    kinds = {token: tree.evidence[node] for node, token in enumerate(tree.tokens)}
    assert [(kind.source, kind.rank) for kind in kinds[50]] == [("table", 1), ("draft model", 0)]
    assert [kind.source for kind in kinds[51]] == ["table"]


def test_it_reads_as_long_as_the_chain_is_likely_enough() -> None:
    for least, num_read in ((0.9, 0), (0.7, 1), (0.6, 2), (0.5, 3)):  # 0.82, 0.67, 0.55, …
        text = CountingText()
        grown(cursor_over(text, [10], least), 10, 20)
        assert len(text.log) == 1 + num_read


def test_what_was_accepted_is_not_read_again() -> None:
    text = CountingText()
    cursor = cursor_over(text, [10], 0.5)
    tree = grown(cursor, 10, 9)
    assert text.ids == [10, 11, 12, 13]
    cursor.observe(StepRecord(row=0, tree=tree, path=[0, 1], committed_ids=[11, 50]))
    assert text.ids == [10, 11]
    assert cursor.expand(cursor.root())[0][0] == 51
    assert text.ids == [10, 11, 50]


def test_a_chain_that_goes_on_behind_the_text_stays() -> None:
    text = CountingText()
    cursor = cursor_over(text, [10], 0.5)
    tree = grown(cursor, 10, 9)
    cursor.observe(StepRecord(row=0, tree=tree, path=[0, 1], committed_ids=[11, 12]))
    text.log.clear()
    assert [token for token, _ in cursor.expand(cursor.root())] == [13, 14]
    assert cursor.expand(cursor.follow((), 13))[0][0] == 14
    assert text.log == []
    grown(cursor, 12, 9)
    assert text.log == [[14], [15]]  # They are as likely as they were at first.


def test_while_it_does_not_pay_the_text_piles_up() -> None:
    text, price = CountingText(), Price(2.0)
    cursor = DraftModelCursor(text, [10], price)
    for token in (20, 30):
        tree = grown(cursor, 10, 4)
        assert len(tree) == 1
        cursor.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[token]))
    assert text.log == []
    price.least = 1.0
    assert grown(cursor, 30, 4).tokens == [30, 31, 32]
    assert text.log == [[10, 20, 30]]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of cursors, which moves for nothing but what a test says."""
    now = [0.0]
    monkeypatch.setattr(small_model, "perf_counter", lambda: now[0])
    return now


class SlowText(CountingText):
    """Takes a tenth of a second for each token."""

    def __init__(self, now: list[float]) -> None:
        super().__init__(num_left=1000)
        self._now = now

    def read(self, token_ids: Sequence[int], depth: int = 0) -> Likely:
        self._now[0] += 0.1 * len(token_ids)
        return super().read(token_ids)

    @property
    def parts(self) -> list[int]:
        return [len(part) for part in self.log]  # type: ignore[arg-type]


PROMPT = [1] * 255 + [10]


def test_a_prompt_is_read_on_only_if_what_is_left_to_write_is_worth_it(now: list[float]) -> None:
    class OneASecond(Budget):
        def break_even_tokens(self, seconds: float) -> float:
            return seconds

    for num_left, parts in ((23, [32, 64, 128, 32]), (22, [32])):
        text = SlowText(now)
        cursor = DraftModelCursor(text, PROMPT, OneASecond(), num_left)
        cursor.prepare()
        assert text.parts == parts
        assert len(grown(cursor, 10, 2)) == 1 + (len(parts) == 4)


def test_a_prompt_waits_for_plain_steps_and_for_what_drafts_may_lose(now: list[float]) -> None:
    """A plain step takes four seconds, and the prompt takes 25.6."""
    text, budget = SlowText(now), MeasuredBudget(CostCurve.unknown(0.2))
    cursor = DraftModelCursor(text, PROMPT, budget)
    cursor.prepare()
    assert text.parts == []  # Whatever it takes: nobody knows what a plain step does.
    budget.curve.refine(1, 4.0)
    budget.curve.refine(1, 4.0)
    cursor.prepare()
    assert text.parts == [32]  # The next part would take 6.4 s, and 0.8 s are left.
    assert budget.ledger.may_lose() * 4 == pytest.approx(0.8, rel=0.1)
    budget.ledger.observe(0.0, 1.6)
    cursor.prepare()
    assert text.parts == [32, 64]
    budget.ledger.observe(0.0, 5.0)
    cursor.prepare()
    assert text.parts == [32, 64, 128, 32]
    assert len(grown(cursor, 10, 2)) == 2
    budget.charge(99.0)
    cursor.prepare()
    assert sum(text.parts) == 256


def test_what_does_not_pay_is_not_read_however_much_it_is() -> None:
    text = CountingText()
    cursor_over(text, [1] * 20, least=1.1)
    assert text.log == []


def test_it_ends_where_the_model_has_no_positions() -> None:
    assert len(grown(cursor_over(CountingText(num_left=2), [8, 9, 10]), 10, 4)) == 1


def test_a_model_that_brings_nothing_is_left_alone_in_all_texts() -> None:
    """It is asked until that is known, which takes some 40 tokens, and again after 256 steps."""
    worth, text = SourceWorth(small_model.FULL_GAIN), CountingText(num_left=1e9)
    cursor = DraftModelCursor(text, [10], Price(0.5), worth=worth)
    num_asked = []
    for _ in range(340):
        text.log.clear()
        cursor.prepare()
        tree = grown(cursor, 10, 2)
        cursor.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[90]))
        num_asked.append(len(text.log))
    asked = [index for index, number in enumerate(num_asked) if number]
    assert 20 < len([index for index in asked if index < 256]) < 60
    assert asked[-1] > 256
    prompt = CountingText()
    other = DraftModelCursor(prompt, [1] * 20, Price(0.5), worth=worth)
    worth._num_paused = 5
    other.prepare()
    assert prompt.log == []  # Not even the prompt of the next text is read.


def test_a_model_that_brings_what_nobody_else_names_is_asked_on() -> None:
    worth, text, next_token = SourceWorth(small_model.FULL_GAIN), CountingText(num_left=1e9), 11
    cursor = DraftModelCursor(text, [10], Price(0.5), worth=worth)
    for _ in range(300):
        cursor.prepare()
        tree = grown(cursor, next_token - 1, 2)
        assert next_token in tree.tokens
        record = StepRecord(row=0, tree=tree, path=[0, 1], committed_ids=[next_token, 11])
        cursor.observe(record)
        next_token = 12


def test_what_others_find_likely_too_is_no_gain() -> None:
    tree = DraftTree.of_root(1)
    ours = Evidence("draft model")
    tree.add(0, 2, 0.9, (Evidence("lut"), ours))
    tree.add(1, 3, 0.9, (Evidence("lut", rank=3, probability_bin=4), ours))
    tree.add(2, 4, 0.9, (Evidence("lut"), Evidence("draft model", rank=0)))
    tree.add(3, 5, 0.9, (ours,))
    record = StepRecord(row=0, tree=tree, path=[0, 1, 2, 3, 4], committed_ids=[2, 3, 4, 5, 6])
    assert small_model._num_brought(record) == 2
