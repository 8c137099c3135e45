"""What a draft model says about a text is what a forward over that text says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from selfspec.neural.small_model import DraftModel, DraftText
from tests.fakes import VOCAB, new_model


class Checked:
    """A text beside the tokens that it should hold."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.text = DraftText(DraftModel(model, num_ids=VOCAB - 2, top_k=5))
        self.ids: list[int] = []

    def read(self, ids: list[int]) -> None:
        self.ids += ids
        with torch.no_grad():
            logits = self.model(torch.tensor([self.ids])).logits[0, -1, : VOCAB - 2]
        found, expected = self.text.read(ids), logits.softmax(-1).topk(5)
        assert [token for token, _ in found] == expected.indices.tolist()
        weights, best = [weight for _, weight in found], expected.values[0]
        assert weights == pytest.approx((expected.values / best).tolist(), rel=1e-3)

    def crop(self, num_tokens: int) -> None:
        self.text.crop(num_tokens)
        del self.ids[len(self.ids) - num_tokens :]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_texts_are_read_and_cropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.neural.small_model._CHUNK", 4)
    dice = random.Random(1)
    checked = Checked(new_model(name))

    def ids(number: int) -> list[int]:
        return [dice.randrange(VOCAB) for _ in range(number)]

    checked.read(ids(6))
    for _ in range(6):
        num_drafts = dice.randrange(1, 5)
        for token in ids(num_drafts):
            checked.read([token])
        checked.crop(dice.randrange(num_drafts + 1))
        checked.read(ids(dice.randrange(1, 7)))


def test_a_device_without_doubles_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "double", None)
    Checked(new_model()).read([3, 4, 5])


def test_positions_are_counted() -> None:
    checked = Checked(new_model("gpt2", n_positions=20))
    checked.read([3, 4, 5])
    assert checked.text.num_left == 17
    checked.crop(1)
    assert checked.text.num_left == 18
