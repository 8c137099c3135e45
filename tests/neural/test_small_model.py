"""What a draft model says about a text is what a forward over that text says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from selfspec.cost import Budget, CostCurve, MeasuredBudget
from selfspec.draft.sources import RowStart
from selfspec.neural import small_model
from selfspec.neural.small_model import DraftModel, SmallModelText
from tests.fakes import VOCAB, new_model


class Checked:
    """A text beside the tokens that it should hold."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        self.model, self.ids = model, ids
        draft_model = DraftModel(model, num_ids=VOCAB - 2, top_k=5)
        self.text = draft_model.text(RowStart(prompt_ids=ids))
        self.text.prepare(Budget())

    def read(self, path: tuple[int, ...]) -> None:
        with torch.no_grad():
            expected = self.model(torch.tensor([[*self.ids, *path]])).logits[0, -1, : VOCAB - 2]
        logits = self.text.read(path)
        assert logits is not None
        assert torch.allclose(logits, expected, atol=1e-4)

    def observe(self, committed: list[int]) -> None:
        self.text.observe(committed)
        self.ids = [*self.ids, *committed]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_paths_are_read_and_dropped(name: str) -> None:
    dice = random.Random(1)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(dice.randrange(VOCAB) for _ in range(number))

    checked = Checked(new_model(name), list(ids(20)))
    for _ in range(6):
        checked.read(())
        first, second = ids(3), ids(2)
        for path in (first, second, (*second, 4), (*first, *second), first[:1]):
            checked.read(path)
        checked.observe([*first[: dice.randrange(4)], *ids(1)])
    checked.read(())
    checked.read((7, 8))
    checked.observe([7])  # The text has come to a token of the path, and what was read stays.
    assert checked.text.read(()) is None
    checked.read((8,))
    checked.read((8, 9))


def test_a_device_without_doubles_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "double", None)
    Checked(new_model(), [3, 4, 5]).read(())


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of texts, which moves for nothing but what a test says."""
    now = [0.0]
    monkeypatch.setattr(small_model, "perf_counter", lambda: now[0])
    return now


class SlowModel(DraftModel):
    """Takes a tenth of a second for each token."""

    def __init__(self, now: list[float]) -> None:
        super().__init__(new_model(), num_ids=VOCAB, top_k=3)
        self._now = now
        self.parts: list[int] = []

    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        self.parts.append(ids.shape[1])
        self._now[0] += 0.1 * ids.shape[1]
        return torch.zeros(VOCAB)


def text_over(model: SlowModel, max_new_tokens: int = 10**6) -> SmallModelText:
    return model.text(RowStart(prompt_ids=[1] * 256, max_new_tokens=max_new_tokens))


def test_a_prompt_is_read_on_only_if_what_is_left_to_write_is_worth_it(now: list[float]) -> None:
    class OneASecond(Budget):
        def break_even_tokens(self, seconds: float) -> float:
            return seconds

    for num_left, parts in ((23, [32, 64, 128, 31]), (22, [32])):
        text = text_over(model := SlowModel(now), num_left)
        text.prepare(OneASecond())
        assert model.parts == parts
        assert (text.read((1,)) is not None) == (len(parts) == 4)
        assert model.parts[len(parts) :] == [2] * (len(parts) == 4)


def test_a_prompt_waits_for_plain_steps_and_for_what_drafts_may_lose(now: list[float]) -> None:
    """A plain step takes four seconds, and the prompt takes 25.6."""
    model, budget = SlowModel(now), MeasuredBudget(CostCurve.unknown(0.2))
    text = text_over(model)
    text.prepare(budget)
    assert model.parts == []  # Whatever it takes: nobody knows what a plain step does.
    budget.curve.refine(1, 4.0)
    budget.curve.refine(1, 4.0)
    text.prepare(budget)
    assert model.parts == [32]  # The next part would take 6.4 s, and 0.8 s are left.
    assert budget.ledger.may_lose() * 4 == pytest.approx(0.8, rel=0.1)
    budget.ledger.observe(0.0, 1.6)
    text.prepare(budget)
    assert model.parts == [32, 64]
    budget.ledger.observe(0.0, 5.0)
    text.prepare(budget)
    assert model.parts == [32, 64, 128, 31]
    budget.charge(99.0)
    text.prepare(budget)
    assert sum(model.parts) == 255
