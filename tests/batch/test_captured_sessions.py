"""Sessions by captured forwards, on a device whose replays run operations and no Python."""

from __future__ import annotations

import random
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from selfspec.cuda.runner import StaticRunner
from selfspec.forward import slots
from selfspec.forward.backends import TreeBackend
from tests.batch.test_session import Ask, FixedPace, Played, alone, drawn, ids_of
from tests.fakes import prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import GREEDY, run_both
from tests.recorder import use_recorders
from tests.sessions import TextSession, wild

NAMES = ("llama", "gemma3", "mistral", "gpt-oss", "qwen2", "qwen3-5", "falcon-h1", "lfm2")


@pytest.fixture(autouse=True)
def nothing_moves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whenever a forward is replayed, each tensor that it uses is where it was at the capture."""
    ready, known, seen = StaticRunner.ready, WeakKeyDictionary[Any, Any](), list[Any]()

    def watched(self: StaticRunner, model: Any, shape: Any, *rest: Any) -> Any:
        found = ready(self, model, shape, *rest)
        if found is None:
            return None
        keys = tuple(self.kv.num_keys(shape.width).items())
        captured = next(c for key, c in self._captures.items() if key[:2] == (shape, keys))
        used = [self._visible, self._inputs[shape], self._outputs]
        held = [part.tensor for part in self.kv._parts]
        places = [(x.data_ptr(), x.shape) for x in [*used, *held, *model.parameters()]]
        assert known.setdefault(captured.replay, places) == places
        seen.append(shape)
        return found

    monkeypatch.setattr(StaticRunner, "ready", watched)
    return seen


def scarce(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """There is no memory when slots are asked for the time `at`, and there is again after it."""
    new_slots, asked = slots.new_slots, iter(range(10**9))

    def new(kind: Any, num_members: int, num_rows: int, capacity: int) -> torch.Tensor:
        if num_rows and capacity and next(asked) == at:
            raise torch.OutOfMemoryError("on purpose")
        return new_slots(kind, num_members, num_rows, capacity)

    monkeypatch.setattr(slots, "new_slots", new)


def play(seed: int, monkeypatch: pytest.MonkeyPatch, longest: int = 90) -> None:
    dice = random.Random(seed)
    fault = dice.choice(["none", "none", "none", "capture", "memory"])
    use_recorders(monkeypatch, fails_at=dice.randrange(2, 30) if fault == "capture" else None)
    options: dict[str, Any] = {"spec": wild(), "max_rows": dice.randrange(1, 9)}
    if dice.random() < 0.4:
        options["pace"] = FixedPace(dice.choice([9, 50]))
    played = Played(drawn(dice, longest), name=dice.choice(NAMES), **options)
    played.session.open()
    if fault == "memory":
        scarce(monkeypatch, dice.randrange(12))
    played.run()
    played.check()


@pytest.mark.parametrize("seed", range(6))
def test_random_sessions(seed: int, monkeypatch: pytest.MonkeyPatch, nothing_moves: Any) -> None:
    play(seed, monkeypatch)
    assert nothing_moves


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_two_thousand_random_sessions(hundred: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        with monkeypatch.context() as patch:
            play(1000 + 100 * hundred + seed, patch, longest=300)


def texts(session: TextSession, given: dict[int, Ask]) -> dict[int, Any]:
    for index, ask in given.items():
        session.submit(index, ids_of(ask), index, ask.settings)
    found = session.answers()
    for index, ask in given.items():
        assert found[index].ids == alone("llama", ask, index)
    return found


def test_rows_share_graphs_that_stay_when_they_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time nothing is captured, and a long prompt is copied into its place."""
    log, spec, counts = use_recorders(monkeypatch), wild(learning="frozen"), []
    given = {index: Ask(length, 0, 5) for index, length in enumerate([3, 40, 700, 1, 17])}
    for _ in range(2):
        session = TextSession(tiny_model(), tiny_tokenizer(), spec, max_rows=3)
        answers = texts(session, given)
        assert {answer.stats.forward for answer in answers.values()} == {"graph"}
        assert session.kv is None  # The next one may have the slots.
        counts.append(log.count("capture"))
    assert counts[0] == counts[1]


def test_a_call_beside_a_session_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use_recorders(monkeypatch)
    spec, model = wild(), tiny_model()
    session = TextSession(model, tiny_tokenizer(), spec, max_rows=2)
    session.submit(0, [5, 6, 7], 0, {"max_new_tokens": 20})
    session.step()
    both = run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert both.stats.eager_reason == "another call is using this model's fixed KV slots"
    other = TextSession(model, tiny_tokenizer(), spec, max_rows=2)
    (answer,) = texts(other, {0: Ask(3, 0, 5)}).values()
    assert answer.stats.eager_reason == both.stats.eager_reason
    assert [answer.stats.forward for answer in session.work()] == ["graph"]
    session.submit(1, [5, 6, 7], 0, {"max_new_tokens": 20})
    session.step()
    del session  # Nobody goes on with it.
    assert run_both(model, prompt(), spec, drafts=False, **GREEDY).stats.forward == "graph"


def test_after_a_shortage_the_next_prompt_captures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no moment passes without rows."""
    use_recorders(monkeypatch)
    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), max_rows=2)
    session.open()
    kinds, captured, left = list[str](), StaticRunner.ready, iter([True])

    def ready(self: StaticRunner, *args: Any) -> Any:
        if next(left, False):
            raise torch.OutOfMemoryError("on purpose")
        return captured(self, *args)

    monkeypatch.setattr(StaticRunner, "ready", ready)
    for index in range(2):
        session.submit(index, [5, 6, 7], index, {"max_new_tokens": 90, "eos_token_id": None})
        for _ in range(8):
            session.step()
            kinds.append(session._engine.backend.forward_name)
    assert kinds == ["eager"] * 8 + ["graph"] * 8


def test_one_forward_that_fails_ends_no_row_and_no_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even where anything but captured forwards is refused."""
    use_recorders(monkeypatch)
    lay_out, faults = TreeBackend.lay_out, list[str]()

    def failing(self: TreeBackend, *args: Any, **options: Any) -> Any:
        run = lay_out(self, *args, **options)
        if len(self.kv.rows) == 2 and self.kv.num_rows == 2 and not faults:
            faults.append(self.forward_name)
            raise RuntimeError("on purpose")
        return run

    monkeypatch.setattr(TreeBackend, "lay_out", failing)
    spec = wild(forward="graph")
    asks = {index: Ask(length, 0, 20) for index, length in enumerate([3, 40, 9])}
    answers = texts(TextSession(tiny_model(), tiny_tokenizer(), spec, max_rows=2), asks)
    assert faults == ["graph"]
    assert answers[2].stats.forward == "graph"


@pytest.mark.parametrize(("at", "forward"), [(0, "graph"), (2, "eager")])
def test_no_memory_for_fixed_slots_loses_no_row(
    at: int, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a later prompt, which finds memory, all rows run by captured forwards again."""
    use_recorders(monkeypatch)
    monkeypatch.setattr("selfspec.forward.sizes._MORE_FIXED", 0)
    spec = wild()
    spec.runner(tiny_model()).support()
    given = {index: Ask(length, 1, 12) for index, length in enumerate([3, 40, 90, 200])}
    session = TextSession(tiny_model(), tiny_tokenizer(), spec, max_rows=4)
    session.open()
    scarce(monkeypatch, at)
    answers = texts(session, given)
    assert {answer.stats.forward for answer in answers.values()} == {forward}
