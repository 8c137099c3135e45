"""Prompts that begin alike are read once, and each text is what `generate()` gives it alone."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch

from selfspec import kept_kv
from selfspec.batch.prompts import inputs_of
from selfspec.forward.columns import Held
from tests.batch.test_session import SETTINGS, FixedPace, wild
from tests.fakes import VOCAB, tiny_model, tiny_tokenizer
from tests.lossless.same import some
from tests.sessions import TextSession

MODELS = ("llama", "gemma3", "gpt-oss", "gpt2", "deepseek-v3", "mistral", "llama4", "bloom")
HYBRIDS = ("qwen3-next", "bamba", "lfm2")
MEMORY = ("1GB", "200KB", None)


@pytest.fixture(autouse=True)
def short_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_kv, "LEAST", 3)


class Asked(NamedTuple):
    ids: tuple[int, ...]
    seed: int
    settings: dict[str, Any]
    leaves: int | None = None  # After so many steps.
    fails: bool = False  # Does a processor of its own fail after some tokens?


class Failing:
    """Its own processor breaks off one text."""

    looks_at_rows = True

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self._length:
            raise ValueError("this text fails")
        return scores


_known: dict[Any, list[int]] = {}


def stock(model: Any, ids: tuple[int, ...], seed: int, settings: dict[str, Any]) -> list[int]:
    """The new tokens of stock's own call."""
    key = id(model), ids, seed, repr(settings)
    if key not in _known:
        torch.manual_seed(seed)
        inputs = torch.tensor([ids])
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            tokenizer=tiny_tokenizer(),
            **settings,
        )
        _known[key] = output[0, len(ids) :].tolist()
    return _known[key]


class Shared:
    """Lets prompts with few beginnings come, again or as the next turn of what was said."""

    def __init__(self, dice: random.Random, model: Any, **options: Any) -> None:
        self.dice = dice
        self.model = model
        self.max_memory = options["max_memory"]
        self.session = TextSession(model, tiny_tokenizer(), **options)
        self.asked: dict[int, Asked] = {}
        self.answers: dict[int, Any] = {}
        self.bases = [self.tokens(45) for _ in range(2)]

    def tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self.dice.randrange(3, VOCAB) for _ in range(number))

    def ids(self) -> tuple[int, ...]:
        dice, before = self.dice, list(self.asked.values())
        ended = [index for index, answer in self.answers.items() if answer.error is None]
        way = dice.random()
        if way < 0.25 and before:
            return dice.choice(before).ids
        if way < 0.55 and ended:
            index = dice.choice(ended)
            text = (*self.asked[index].ids, *self.answers[index].ids)
            return (*text[: dice.randrange(len(text) - 2, len(text) + 1)], *self.tokens(2))
        start = dice.choice(self.bases)[: dice.randrange(1, 45)]
        return (*start, *self.tokens(dice.randrange(6)))

    def submit(self, step: int) -> None:
        dice, index = self.dice, len(self.asked)
        settings = {**dice.choice(SETTINGS), "max_new_tokens": dice.choice([1, 3, 8])}
        leaves = step + dice.randrange(5) if dice.random() < 0.1 else None
        asked = Asked(self.ids(), index, settings, leaves, dice.random() < 0.1)
        self.asked[index] = asked
        settings = dict(settings)
        if asked.fails:
            settings["logits_processor"] = [Failing(len(asked.ids) + dice.randrange(4))]
        inputs: Any = list(asked.ids)
        if dice.random() < 0.1 and len(asked.ids) < 30:  # Padded on the left, as by a processor.
            ids = torch.tensor([[0, 0, *asked.ids]])
            mask = torch.ones_like(ids)
            mask[:, :2] = 0
            inputs = inputs_of({"input_ids": ids, "attention_mask": mask}, tiny_tokenizer())
        self.session.submit(index, inputs, asked.seed, settings)

    def run(self, number: int) -> None:
        for step in range(600):
            if len(self.asked) < number and self.dice.random() < 0.6:
                self.submit(step)
            for index, asked in self.asked.items():
                if asked.leaves == step:
                    self.session.cancel(index)
            self.answers |= {answer.index: answer for answer in self.session.step()}
            self.check_memory()
            if self.session.is_empty and len(self.asked) == number:
                return
        raise AssertionError("the session came to no end")

    def check_memory(self) -> None:
        session, kv = self.session, self.session.kv
        kept = session.kept_kv_bytes
        store = session._runner._kept_kv
        if isinstance(store, kept_kv.KeptKV):
            assert sum(text.num_bytes for text in store._texts) == kept <= store._limit
        if session._max_bytes is not None:
            assert (0 if kv is None else kv.nbytes) + kept <= session._max_bytes

    def check(self) -> None:
        for index, asked in self.asked.items():
            expected = stock(self.model, asked.ids, asked.seed, asked.settings)
            if index in self.answers:
                answer = self.answers[index]
                if asked.fails and answer.error is not None:
                    assert str(answer.error) == "this text fails"
                    assert answer.ids == expected[: len(answer.ids)]
                else:
                    assert answer.error is None, (answer.error, answer.error.__cause__)
                    assert answer.ids == expected
            else:
                assert asked.leaves is not None

    @property
    def num_kept(self) -> int:
        return self.session._spec.total_stats.num_prompt_tokens_kept


def play(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> Shared:
    dice = random.Random(seed)
    if dice.random() < 0.15:
        copies = kept_kv._copy

        def scarce(held: Held) -> Held:
            if dice.random() < 0.4:
                raise torch.OutOfMemoryError
            return copies(held)

        monkeypatch.setattr(kept_kv, "_copy", scarce)
    learning = dice.choice(["session", "session", "frozen"])
    played = Shared(
        dice,
        tiny_model(name),
        spec=wild(kept_kv=dice.choice([None, "100KB", "1GB"]), learning=learning),
        max_rows=dice.randrange(1, 4),
        max_memory=dice.choice(MEMORY),
        pace=FixedPace(dice.choice([2, 7, 50])),
        short_first=dice.random() < 0.5,
        keeps_kv=dice.random() < 0.7,
    )
    played.run(dice.randrange(3, 9))
    played.check()
    return played


@pytest.mark.parametrize("seed", some(range(24)))
def test_random_sessions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play((*MODELS, *HYBRIDS)[seed % (len(MODELS) + len(HYBRIDS))], seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_random_sessions(part: int) -> None:
    num_kept = 0
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kept_kv, "LEAST", 3)
            name = random.Random(seed).choice((*MODELS, *HYBRIDS))
            num_kept += play(name, seed, patch).num_kept
    assert num_kept > 1000
