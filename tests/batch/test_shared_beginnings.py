"""Prompts that begin alike are read once, and each text is what `generate()` gives it alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from selfspec import kept_kv
from selfspec.forward import backends
from selfspec.forward import prompt as prompt_module
from selfspec.forward.columns import TextKV
from selfspec.forward.states.slots import States
from selfspec.forward.tree_kv import TreeKV
from tests.batch.test_session import SETTINGS, Ask, Broken, FixedPace, Fuse, Played
from tests.fakes import VOCAB, new_model, tiny_model, tiny_tokenizer, with_lora
from tests.lossless.same import some
from tests.lossless.seeing import prompt_with_image, seeing_model
from tests.recorder import use_recorders
from tests.sessions import TextSession, alone, wild
from tests.zoo import BOUNDED

MODELS = ("llama", "gemma3", "gpt-oss", "gpt2", "deepseek-v3", "mistral", "llama4", "bloom")
HYBRIDS = ("qwen3-next", "bamba", "lfm2", "nemotron-h")


@pytest.fixture(autouse=True)
def short_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_kv, "LEAST", 3)


class Shared(Played):
    """Prompts with few beginnings: of earlier ones, or the next turn of what was said."""

    def __init__(self, dice: random.Random, **options: Any) -> None:
        self.dice = dice
        self.bases = [self.tokens(45) for _ in range(2)]
        asks = []
        for index in range(dice.randrange(3, 9)):
            arrives = 2 * index + dice.randrange(3)
            leaves = arrives + dice.randrange(5) if dice.random() < 0.1 else None
            fails_at = dice.randrange(1, 5) if dice.random() < 0.1 else None
            kind, number = dice.randrange(len(SETTINGS)), dice.choice([1, 3, 8])
            asks.append(Ask(0, kind, number, arrives, leaves, fails_at=fails_at))
        super().__init__(asks, **options)

    def tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self.dice.randrange(3, VOCAB) for _ in range(number))

    def ids(self, ask: Ask) -> tuple[int, ...]:
        dice, way = self.dice, self.dice.random()
        ended = [index for index, answer in self.answers.items() if answer.error is None]
        if way < 0.25 and self.given:
            return dice.choice(list(self.given.values()))
        if way < 0.55 and ended:
            index = dice.choice(ended)
            text = (*self.given[index], *self.answers[index].ids)
            return (*text[: dice.randrange(len(text) - 2, len(text) + 1)], *self.tokens(2))
        start = dice.choice(self.bases)[: dice.randrange(1, 45)]
        return (*start, *self.tokens(dice.randrange(6)))

    def look(self) -> None:
        session, kv = self.session, self.session.kv
        kept = session.kept_kv_bytes
        store = session._runner._kept_kv
        if isinstance(store, kept_kv.PrefixStore):
            assert sum(text.num_bytes for text in store._texts) == kept <= store._limit
        if session.memory._max_bytes is not None:
            assert getattr(kv, "nbytes", 0) + kept <= session.memory._max_bytes


def play(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens of prompts were not read."""
    dice = random.Random(seed)
    if dice.random() < 0.15:
        copies = kept_kv._copy

        def scarce(held: TextKV) -> TextKV:
            if dice.random() < 0.4:
                raise torch.OutOfMemoryError
            return copies(held)

        monkeypatch.setattr(kept_kv, "_copy", scarce)
    little = "900KB" if name in HYBRIDS else "200KB"  # Running states take 600 KB.
    learning = dice.choice(["session", "session", "frozen"])
    spec = wild(kept_kv=dice.choice([None, "100KB", "1GB"]), learning=learning)
    played = Shared(
        dice,
        name=name,
        spec=spec,
        max_rows=dice.randrange(1, 4),
        max_memory=dice.choice(("1GB", little, None)),
        pace=FixedPace(dice.choice([2, 7, 50])),
        keeps_kv=dice.random() < 0.7,
    )
    played.run()
    played.check()
    return spec.total_stats.num_prompt_tokens_kept


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_random_sessions(part: int) -> None:
    num_kept = 0
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        with pytest.MonkeyPatch.context() as patch:
            name = random.Random(seed).choice((*MODELS, *HYBRIDS))
            num_kept += play(name, seed, patch)
    assert num_kept > 1000


@pytest.mark.parametrize("seed", some(range(24)))
def test_random_sessions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play((*MODELS, *HYBRIDS)[seed % (len(MODELS) + len(HYBRIDS))], seed, monkeypatch)


@pytest.mark.parametrize("name", list(BOUNDED))
def test_states_of_plain_steps_are_not_those_of_a_prompt(name: str) -> None:
    """Where prompts bound time steps, they are read at once, and again in the next turn."""
    model = new_model(name)
    for part in model.modules():
        if hasattr(part, "time_step_limit"):
            part.time_step_limit = 1.5, float("inf")
    options: dict[str, Any] = {"max_memory": "1GB", "pace": FixedPace(1), "max_rows": 2}
    session = TextSession(model, tiny_tokenizer(), spec=wild(kept_kv="1GB"), **options)
    ids, settings = tuple(range(3, 23)), {"max_new_tokens": 8, "do_sample": False}
    for index in range(3):
        session.submit(index, list(ids), 0, settings)
        (answer,) = session.work()
        assert answer.ids == alone(model, ids, 0, **settings)
        assert "bound the time steps" in answer.stats.kept_reason
        ids = (*ids, *answer.ids, 5)


@pytest.mark.parametrize("seed", some(range(8)))
def test_captured_forwards_and_fixed_slots(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_recorders(monkeypatch)
    play(("llama", "gemma3", "mistral", "gpt-oss")[seed % 4], 300 + seed, monkeypatch)


def texts(session: TextSession, asked: list[tuple[Any, int]], **settings: Any) -> list[Any]:
    """The answers to prompts, by their seeds; each is stock's."""
    settings = {"max_new_tokens": 6, **settings}
    for index, (ids, seed) in enumerate(asked):
        session.submit(index, list(ids), seed, settings)
    answers = session.answers()
    for index, (ids, seed) in enumerate(asked):
        options = {**settings, "tokenizer": tiny_tokenizer()}
        assert answers[index].ids == alone(session._runner.model, ids, seed, **options)
    return [answers[index] for index in range(len(asked))]


def kept_of(answers: list[Any]) -> list[int]:
    return [answer.stats.num_prompt_tokens_kept for answer in answers]


KEEPS: dict[str, Any] = {"max_rows": 1, "max_memory": "1GB", "keeps_kv": True}
IDS = tuple(torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(4)).tolist())


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
def test_samples_of_one_prompt_read_it_once(name: str) -> None:
    """While they run without any memory for texts that have ended, but for running states."""
    memory = {"max_memory": "1GB", "keeps_kv": True} if name == "qwen3-next" else {}
    session = TextSession(tiny_model(name), tiny_tokenizer(), wild(), max_rows=4, **memory)
    answers = texts(session, [(IDS, seed) for seed in range(4)], do_sample=True)
    assert kept_of(answers) == [0, 40, 40, 40]
    assert memory or session.kept_kv_bytes == 0


class Writing:
    """Writes into the scores that it is given, as stock lets processors do."""

    is_row_wise = True

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -float("inf")
        return scores


@pytest.mark.parametrize("max_rows", [1, 4])
def test_processors_that_write_into_scores_change_no_other_text(max_rows: int) -> None:
    options = {**KEEPS, "max_rows": max_rows}
    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), **options)
    for index in range(6):
        own = {"logits_processor": [Writing()]} if index % 2 == 0 else {}
        session.submit(index, list(IDS), 0, {"max_new_tokens": 4, **own})
    answers = session.answers()
    for index, answer in answers.items():
        own = {"logits_processor": [Writing()]} if index % 2 == 0 else {}
        assert answer.ids == alone(tiny_model(), IDS, 0, max_new_tokens=4, **own)
    assert kept_of([answers[index] for index in range(6)]) == [0, 40, 40, 40, 40, 40]


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [({}, [0, 30]), ({"kept_kv": 0}, [0, 0]), ({"learning": "request"}, [0, 0])],
    ids=["default", "off", "request"],
)
def test_who_shares(knobs: dict[str, Any], kept: list[int]) -> None:
    more = (*IDS[:30], 7, 8)
    spec = wild(**knobs)
    session = TextSession(tiny_model(), tiny_tokenizer(), spec, **KEEPS)
    assert kept_of(texts(session, [(IDS, 0), (more, 1)])) == kept
    assert bool(session.kept_kv_bytes) == (not knobs)  # Nothing is kept for nobody.


def test_prompts_of_one_scope_share_where_learning_ends_with_the_request() -> None:
    spec = wild(learning="request")
    session = TextSession(tiny_model(), tiny_tokenizer(), spec, **KEEPS)
    for index in range(4):
        arguments, scope = {"max_new_tokens": 3}, index // 2
        session.add(session.maker.prompt(index, list(IDS), index, arguments, scope))
    answers = session.answers()
    assert kept_of([answers[index] for index in range(4)]) == [0, 40, 0, 40]


def test_a_text_that_fails_keeps_nothing() -> None:
    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), **KEEPS)
    session.submit(0, list(IDS), 0, {"logits_processor": [Fuse(3)], "max_new_tokens": 6})
    (answer,) = session.work()
    assert isinstance(answer.error, Broken)
    assert session.kept_kv_bytes == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
@pytest.mark.parametrize("num_steps", [1, 3, 9])
def test_what_was_read_for_who_has_left_is_kept(name: str, num_steps: int) -> None:
    """In the midst of its prompt, or of its text."""
    options = {**KEEPS, "pace": FixedPace(12)}
    session = TextSession(tiny_model(name), tiny_tokenizer(), wild(), **options)
    session.submit(0, list(IDS), 0, {"max_new_tokens": 30})
    for _ in range(num_steps):
        assert not session.step()
    session.cancel(0)
    assert not session.work()
    assert session.kept_kv_bytes > 0
    (kept,) = kept_of(texts(session, [(IDS, 0)]))
    assert kept == min(12 * num_steps, 40)


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_kept_texts_give_their_memory_to_those_that_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it ends in a step, that is done once more."""
    options = {**KEEPS, "pace": FixedPace(8)}
    session = TextSession(tiny_model(name), tiny_tokenizer(), wild(), **options)
    texts(session, [(IDS, 0)])
    logits_of, sizes = backends.logits_of, []

    def scarce(*given: Any) -> Any:
        sizes.append(session.kept_kv_bytes)
        outcome = logits_of(*given)
        if sizes[-1] and len(sizes) > 1:
            raise torch.OutOfMemoryError
        return outcome

    monkeypatch.setattr(backends, "logits_of", scarce)
    other = tuple(token + 1 for token in IDS)
    (answer,) = texts(session, [(other, 1)])
    assert 0 in sizes
    assert answer.stats.num_prompt_tokens_kept == 0


PLACES_OF_MEMORY = {
    "prompt": (prompt_module, "prefill"),
    "slots": (TreeKV, "add"),
    "states": (States, "add"),
}


@pytest.mark.parametrize("where", PLACES_OF_MEMORY)
@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_a_prompt_for_which_memory_ends_has_the_error_and_leaves_memory_to_the_next_one(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = TextSession(tiny_model(name), tiny_tokenizer(), wild(), **KEEPS)
    texts(session, [(IDS, 0)])
    place, call = PLACES_OF_MEMORY[where]
    stock, other = getattr(place, call), [token + 1 for token in IDS]

    def scarce(*given: Any) -> Any:
        if session.kept_kv_bytes:
            raise torch.OutOfMemoryError
        return stock(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, call, scarce)
        session.submit(0, other, 0, {"max_new_tokens": 4})
        (answer,) = session.work()
    assert isinstance(answer.error, torch.OutOfMemoryError)
    assert session.kept_kv_bytes == 0
    session.submit(1, other, 0, {"max_new_tokens": 4})
    (answer,) = session.work()
    assert answer.ids == alone(tiny_model(name), other, 0, max_new_tokens=4)


def test_images_are_read_with_their_prompts() -> None:
    """The same ids may have another image; what is kept of text is of no use there, nor theirs."""
    name = "llava"
    model, seen = seeing_model(name), prompt_with_image(name)
    session = TextSession(model, tiny_tokenizer(), wild(), **{**KEEPS, "max_rows": 2})
    for index, factor in enumerate((1.0, -1.0, 1.0)):
        inputs = {**seen, "pixel_values": seen["pixel_values"] * factor}
        session.submit(index, inputs, 0, {"max_new_tokens": 5})
        (answer,) = session.work()
        assert answer.ids == alone(model, inputs, 0, max_new_tokens=5)
        assert answer.stats.num_prompt_tokens_kept == 0
        assert "one part" in str(answer.stats.kept_reason)
    assert session.kept_kv_bytes == 0


@pytest.mark.parametrize("seed", some(range(6)))
@pytest.mark.filterwarnings("ignore")  # peft reads a name that transformers has deprecated.
def test_adapters_and_weights_that_change_in_between(seed: int) -> None:
    """What was read with others is of no use, not even where they come back."""
    dice, model = random.Random(seed), with_lora(new_model(), "one", "two")
    session = TextSession(model, tiny_tokenizer(), wild(), **{**KEEPS, "max_rows": 2})
    inner = model.get_base_model()
    head = inner.model.layers[0].mlp.up_proj.weight
    before = None
    for _ in range(8):
        change = dice.choice(["one", "two", "written", "none"])
        if change == "written":
            head.data.mul_(1.01)  # Torch does not count this.
        elif change != "none":
            model.set_adapter(change)
        state = (model.active_adapter, float(head.sum()))
        answers = texts(session, [((*IDS[:30], dice.randrange(3, 9), 5), 0)])
        assert bool(kept_of(answers)[0]) == (state == before)
        before = state


def test_a_router_that_chooses_fewer_experts_has_other_keys_and_values() -> None:
    model = new_model("mixtral")
    session = TextSession(model, tiny_tokenizer(), wild(), **KEEPS)
    for number, kept in ((2, 0), (2, len(IDS)), (1, 0), (1, len(IDS))):
        for layer in model.model.layers:
            layer.mlp.gate.top_k = number
        assert kept_of(texts(session, [(IDS, 0)])) == [kept]


def test_hooks_may_decide_on_what_is_kept() -> None:
    model = new_model()
    session = TextSession(model, tiny_tokenizer(), wild(trust_hooks=True), **KEEPS)
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: output * 1.1)
    answers = texts(session, [(IDS, 0), (IDS, 1)])
    assert kept_of(answers) == [0, 0]
    assert "hooks" in str(answers[1].stats.kept_reason)
