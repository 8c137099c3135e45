"""A session that steps: texts are those of `generate()` alone, whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from selfspec import UnsupportedError
from selfspec.session import ReadingPace
from tests.fakes import VOCAB, new_model, tiny_model, tiny_tokenizer
from tests.lossless.same import some
from tests.sessions import TextSession, wild
from tests.sessions import alone as alone_with

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 0.8},
    {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3},
    {"do_sample": True, "top_p": 0.7, "eos_token_id": [15, 26]},
    {"sequence_bias": {(9,): 4.0}, "no_repeat_ngram_size": 2},
    {"stop_strings": ["at", "he"], "eos_token_id": 2},
)


class Broken(Exception):
    """Raised on purpose."""


class Fuse:
    """Raises at the n-th time; a logits processor of one text."""

    is_row_wise = True

    def __init__(self, at: int, error: type[Exception] = Broken) -> None:
        self.left = at
        self._error = error

    def burn(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self._error("on purpose")

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.burn()
        return scores


class Ask(NamedTuple):
    """A prompt, how it is answered, and when its client comes and goes."""

    length: int
    kind: int  # of SETTINGS
    max_new_tokens: int
    arrives: int = 0
    leaves: int | None = None
    stops_reading: int | None = None  # Behind so many tokens.
    fails_at: int | None = None  # The token at which a processor of its own breaks.

    @property
    def settings(self) -> dict[str, Any]:
        return {**SETTINGS[self.kind], "max_new_tokens": self.max_new_tokens}


class FixedPace(ReadingPace):
    """Parts of a length that no clock decides on."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def num_tokens(self, num_rows: int) -> int:
        return self.length


def ids_of(ask: Ask) -> tuple[int, ...]:
    dice = torch.Generator().manual_seed(100 * ask.length + ask.kind)
    return tuple(torch.randint(3, VOCAB, (ask.length,), generator=dice).tolist())


@cache
def stock(name: str, ids: tuple[int, ...], kind: int, number: int, seed: int) -> list[int]:
    """The new tokens of stock's own call, so many at most."""
    options = {**SETTINGS[kind], "max_new_tokens": number, "tokenizer": tiny_tokenizer()}
    return alone_with(tiny_model(name), ids, seed, **options)


def alone(name: str, ask: Ask, seed: int) -> list[int]:
    return stock(name, ids_of(ask), ask.kind, ask.max_new_tokens, seed)


class Played:
    """Lets clients come and go while a session steps."""

    def __init__(self, asks: Sequence[Ask], *, name: str = "llama", **options: Any) -> None:
        self.asks, self.name = asks, name
        self.given: dict[int, tuple[int, ...]] = {}  # The prompts that have come.
        self.heard: dict[int, list[int]] = {index: [] for index in range(len(asks))}
        self.answers: dict[int, Any] = {}
        self.session = TextSession(
            tiny_model(name), tiny_tokenizer(), on_token=self.on_token, **options
        )

    def on_token(self, index: int, ids: Sequence[int]) -> bool:
        assert index not in self.answers
        self.heard[index] += ids
        most = self.asks[index].stops_reading
        return most is None or len(self.heard[index]) < most

    def ids(self, ask: Ask) -> tuple[int, ...]:
        return ids_of(ask)

    def look(self) -> None:
        """Called after each step."""

    def submit(self, index: int, ask: Ask) -> None:
        self.given[index], settings = self.ids(ask), ask.settings
        if ask.fails_at is not None:
            settings["logits_processor"] = [Fuse(ask.fails_at)]
        self.session.submit(index, self.given[index], index, settings)

    def run(self) -> None:
        for step in range(600):
            for index, ask in enumerate(self.asks):
                if ask.arrives == step:
                    self.submit(index, ask)
                if ask.leaves == step:
                    self.session.cancel(index)
            self.answers |= {answer.index: answer for answer in self.session.step()}
            self.look()
            if self.session.is_empty and all(ask.arrives <= step for ask in self.asks):
                return
        raise AssertionError("the session came to no end")

    def check(self) -> None:
        for index, ask in enumerate(self.asks):
            expected = stock(self.name, self.given[index], ask.kind, ask.max_new_tokens, index)
            answer, heard = self.answers.get(index), self.heard[index]
            assert heard == expected[: len(heard)]
            if answer is None:
                assert ask.leaves is not None or ask.stops_reading is not None
            elif answer.error is not None:
                assert ask.fails_at is not None
                assert isinstance(answer.error, Broken), answer.error
                assert answer.ids == expected[: len(answer.ids)]
            else:
                assert answer.ids == heard == expected


def drawn(dice: random.Random, longest: int) -> list[Ask]:
    asks = []
    for _ in range(dice.randrange(1, 10)):
        arrives = dice.randrange(12)
        leaves = arrives + dice.randrange(10) if dice.random() < 0.15 else None
        asks.append(
            Ask(
                length=dice.choice([n for n in (1, 2, 3, 17, 40, 90, 300) if n <= longest]),
                kind=dice.randrange(len(SETTINGS)),
                max_new_tokens=dice.choice([1, 2, 5, 9, 14]),
                arrives=arrives,
                leaves=leaves,
                stops_reading=dice.randrange(1, 6) if dice.random() < 0.1 else None,
            )
        )
    return asks


@pytest.mark.parametrize("seed", some(range(18)))
def test_texts_are_those_of_each_prompt_alone(seed: int) -> None:
    dice = random.Random(seed)
    played = Played(
        drawn(dice, longest=40),
        spec=wild(learning=("session", "request", "frozen")[seed % 3]),
        max_rows=dice.randrange(1, 5),
        pace=FixedPace(dice.choice([2, 7, 50])),
    )
    played.run()
    played.check()
    assert played.session.kv_bytes_in_use == 0


@pytest.mark.parametrize(
    "name", ["mistral", "gemma3", "gpt2", "deepseek-v3", "paligemma", "bloom", "rwkv"]
)
def test_prompts_in_parts_by_every_kind_of_model(name: str) -> None:
    """Also by those that are decoded alone, between rows of which none may be there."""
    asks = [Ask(40, 0, 8), Ask(33, 1, 8, arrives=1), Ask(17, 2, 8, arrives=2, leaves=6)]
    played = Played(asks, name=name, spec=wild(), max_rows=3, pace=FixedPace(9))
    played.run()
    played.check()
    is_alone = name in ("bloom", "rwkv")
    assert bool(played.session.alone_reasons) == is_alone


def test_a_long_prompt_holds_up_nobody() -> None:
    asks = [Ask(3, 0, 12), Ask(40, 0, 1, arrives=1)]
    played = Played(asks, spec=wild(), pace=FixedPace(4))
    grown = []
    step = played.session.step

    def noted() -> Any:
        answers = step()
        grown.append((len(played.heard[0]), len(played.heard[1])))
        return answers

    played.session.step = noted  # type: ignore[method-assign]
    played.run()
    played.check()
    while_reading = [first for first, second in grown[1:] if not second and first < 12]
    assert len(while_reading) > 1
    assert while_reading == sorted(set(while_reading))


def test_what_is_alone_has_its_turn_while_others_come() -> None:
    """A stopping rule of its own sends a prompt to the side, but not to the end for ever."""
    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), max_rows=1)
    session.submit(0, [5, 6, 7], 0, {"max_new_tokens": 4, "max_time": 1000.0})
    order: list[int] = []
    for index in range(1, 12):
        session.submit(index, [5, 6, 7], 0, {"max_new_tokens": 4})
        order += [answer.index for answer in session.work()]
    assert 0 in order[:4]
    assert list(session.alone_reasons) == ["its stopping criteria look at more than their own row"]


def test_what_is_alone_is_prepared_once_and_written_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So its client may leave, and the time that it may take counts from its turn."""
    model = new_model()
    session = TextSession(model, tiny_tokenizer(), wild())
    generate, prepared = model.generate, []

    def noted(**inputs: Any) -> Any:
        prepared.append(inputs)
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", noted)
    prompts = [
        session.call(index, [5, 6, 7], 0, {"max_new_tokens": 12, "max_time": 1000.0})
        for index in range(2)
    ]
    for prompt in prompts:
        (clock,) = (each for each in prompt.stopping_criteria if hasattr(each, "initial_timestamp"))
        clock.initial_timestamp = 0.0  # As if it had waited for an hour.
        session.add(prompt)
    for _ in range(2):
        assert not session.step()
    assert 0 < len(prompts[0].new_ids) < 12
    session.cancel(0)
    answers = session.answers()
    assert [(index, len(answer.ids)) for index, answer in answers.items()] == [(1, 12)]
    assert len(prepared) == 2


def test_memory_bounds_what_is_alone_too() -> None:
    session = TextSession(tiny_model("bloom"), tiny_tokenizer(), wild(), max_memory=10_000)
    with pytest.raises(UnsupportedError, match="must fit"):
        session.submit(0, [5, 6], 0, {"max_new_tokens": 1000})


def test_memory_bounds_no_model_that_keeps_no_columns() -> None:
    session = TextSession(tiny_model("falcon-mamba"), tiny_tokenizer(), wild(), max_memory=10_000)
    session.submit(0, [5, 6], 0, {"max_new_tokens": 4})
    (answer,) = session.work()
    assert answer.error is None


def test_listeners_hear_while_they_listen() -> None:
    """Also if they came after the first prompt, and not after their `with` has ended."""
    spec = wild()
    session = TextSession(tiny_model(), tiny_tokenizer(), spec)
    heard: dict[str, set[int]] = {"first": set(), "second": set()}
    for index, name in enumerate(heard):
        with spec.listening(lambda record, name=name: heard[name].add(record.row)):
            session.submit(index, [5, 6, 7], 0, {"max_new_tokens": 40})
            session.step()
    assert heard == {"first": {0}, "second": {0, 1}}
    session.submit(2, [5, 6, 7], 0, {"max_new_tokens": 40})
    session.work()
    assert heard == {"first": {0}, "second": {0, 1}}


def test_what_fails_after_a_text_loses_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows end in the same step, and the end of each call fails."""

    def fail(_call: Any) -> None:
        raise OSError("no space")

    spec = wild()
    session = TextSession(tiny_model(), tiny_tokenizer(), spec)
    monkeypatch.setattr(spec, "finish", fail)
    for index in range(3):
        session.submit(index, [5, 6, 7], 0, {"max_new_tokens": 4})
    answers = session.work()
    assert [len(answer.ids) for answer in answers] == [4, 4, 4]
    assert all("no space" in str(answer.error) for answer in answers)


def test_the_memory_in_use_is_asked_for_while_it_is_given_up() -> None:
    class Fleeting(TextSession):
        """Another thread gives the engine up right after the first look at it."""

        @property
        def _engine(self) -> Any:
            held, self.held = self.held, None
            return held

        @_engine.setter
        def _engine(self, value: Any) -> None:
            self.held = value

    session = Fleeting(tiny_model(), tiny_tokenizer(), wild())
    nothing = SimpleNamespace(column_bytes=1)
    session._engine = SimpleNamespace(rows=[], backend=SimpleNamespace(kv=nothing))
    assert session.kv_bytes_in_use == 0


def test_an_open_session_looks_nothing_up_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are prepared in other threads, where no forward may run."""
    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), max_memory="1MB")
    session.open()
    monkeypatch.setattr(session, "_open_engine", None)
    for options in ({}, {"max_time": 1000.0}):
        assert session.call(0, [5, 6, 7], 0, {"max_new_tokens": 4, **options})
