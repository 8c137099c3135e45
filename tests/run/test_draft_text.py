"""What a draft model says behind its text and behind nodes is what a fresh forward says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from selfspec.cost import Pacing
from selfspec.run.draft_model import DraftModel, DraftText
from selfspec.run.graphs.backend import GraphBackend
from selfspec.run.graphs.runner import StaticRunner
from selfspec.run.packed import Packing
from selfspec.run.probe import attention_types
from tests.fakes import VOCAB, fake_trials, new_model, packs_here
from tests.recorder import RecordingDevice


class Checked:
    """A text and its nodes, with the tokens in front of each node beside them."""

    def __init__(self, model: Any, *, captured: bool = False) -> None:
        self.model = model
        attention = attention_types(model.config)
        reader = DraftModel(model, attention, Pacing(), num_ids=VOCAB - 2, top_k=5)
        if captured:
            device: Any = RecordingDevice([])
            reader.runner = StaticRunner(attention, device, model.device)
        self.text: DraftText = reader.open()
        self.prefixes: list[list[int]] = [[]]

    def extend(self, ids: list[int]) -> None:
        self.prefixes = [self.prefixes[0] + ids]
        self.check([self.text.extend(ids)], self.prefixes)

    def look(self, ids: list[int], parents: list[int]) -> None:
        new = [[*self.prefixes[parent], token] for token, parent in zip(ids, parents, strict=True)]
        self.check(self.text.look(ids, parents), new)
        self.prefixes += new

    def keep(self, path: list[int]) -> None:
        self.text.keep(path)
        self.prefixes = [self.prefixes[path[-1]]]

    def check(self, found: list[Any], prefixes: list[list[int]]) -> None:
        for likely, prefix in zip(found, prefixes, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([prefix])).logits[0, -1, : VOCAB - 2]
            expected = logits.softmax(-1).topk(5)
            assert [token for token, _ in likely] == expected.indices.tolist()
            chances = [chance for _, chance in likely]
            assert chances == pytest.approx(expected.values.tolist(), rel=1e-3)


def test_a_device_without_doubles_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "double", None)
    Checked(new_model()).extend([3, 4, 5])


@pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")
def test_a_draft_model_is_packed_once_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch, saves=0.5, packing=1)
    model = new_model()
    packing = Packing.of(model)
    attention = attention_types(model.config)
    sizes = {"num_ids": VOCAB, "top_k": 5}
    texts = [
        DraftModel(model, attention, Pacing(), **sizes, packing=each).open()
        for each in (None, packing)
    ]
    ids, parents = [3, 4, 5], [0, 1, 1]
    plain, ours = ([text.extend(ids), *text.look(ids, parents)] for text in texts)
    assert packing.is_packed
    assert [[token for token, _ in likely] for likely in ours] == [
        [token for token, _ in likely] for likely in plain
    ]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_trees_are_read_and_kept_in_part(
    name: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("_CHUNK", "_STATIC_CHUNK"):
        monkeypatch.setattr(f"selfspec.run.draft_model.{constant}", 4)
    for constant in ("_ROOM", "_STATIC_ROOM"):  # It has to grow within a step.
        monkeypatch.setattr(f"selfspec.run.draft_model.{constant}", 3)
    dice = random.Random(1)
    checked = Checked(new_model(name), captured=captured)

    def ids(number: int) -> list[int]:
        return [dice.randrange(VOCAB) for _ in range(number)]

    checked.extend(ids(6))
    for _ in range(6):
        checked.look(ids(2), [0, 0])
        checked.look(ids(3), [2, 1, 2])
        checked.look(ids(2), [5, 3])
        checked.keep(dice.choice([[0], [0, 2], [0, 2, 5], [0, 2, 5, 6]]))
        checked.extend(ids(dice.randrange(1, 7)))
    assert isinstance(checked.text._backend, GraphBackend) == captured


def test_positions_are_counted() -> None:
    checked = Checked(new_model("gpt2", n_positions=20))
    checked.extend([3, 4, 5])
    assert checked.text.room == 17
    assert Checked(new_model("gpt2")).text.room > 20
