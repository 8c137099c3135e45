"""KV caches and embeddings that a user hands in, and what a call hands back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec import SelfSpec
from selfspec.compat.generation import KV, kv_of
from tests.fakes import new_model, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    MODES,
    NUM_COLUMNS,
    ROUNDING,
    SAMPLE,
    Call,
    assert_same_ids,
    assert_same_kv,
    doubting,
    few,
    knowing,
    run,
    run_both,
    run_both_on_a_kv,
    slow,
)
from tests.zoo import HYBRID

WINDOWED = ["llama", "mistral", "gemma3", "llama4"]
CHATTING = ("llama", "gemma3", "qwen3-5", "falcon-h1", "lfm2", "inkling", "qwen4")


@pytest.mark.parametrize("kind", ["bare", "configured", "large"])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_cache_that_was_handed_in_is_filled_in_place(
    name: str, kind: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one is taken over in parts."""
    if kind == "large":
        monkeypatch.setattr("selfspec.forward.slots._SMALL", 1)
    options = call.options | {"eos_token_id": [15, 26]}
    run_both_on_a_kv(tiny_model(name), call.inputs, kind, **options)


def test_a_cache_that_nothing_marks_is_filled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a user's method takes in caches, so that nobody says whose they are."""
    model = new_model()
    monkeypatch.setattr(model, "_prepare_cache_for_generation", lambda *_, **__: None)
    run_both_on_a_kv(model, prompt(), "bare", drafts=False, **GREEDY)


@pytest.mark.parametrize("kind", ["bare", "configured"])
def test_a_cache_that_was_handed_in_outgrows_the_first_arenas(kind: str) -> None:
    """A bare one keeps what no window sees any more, as stock's does."""
    run_both_on_a_kv(tiny_model("mistral"), prompt(), kind, max_new_tokens=260, **GREEDY)


def chat(
    model: Any, speakers: Sequence[str], call: Call, spec: SelfSpec | None = None
) -> tuple[torch.Tensor, DynamicCache]:
    """Turns on one cache, each by stock or by us; the last turn's ids and the cache."""
    inputs, kv = call.inputs, DynamicCache(config=model.config)
    for turn, speaker in enumerate(speakers):
        ours = {"custom_generate": spec} if speaker == "ours" else {}
        asked = {KV: kv, "max_new_tokens": 13, **call.options, **ours}
        outcome = run(model, inputs, seed=turn, **asked)
        inputs = answered(outcome.ids, inputs, turn)
    return outcome.ids, kv


def answered(ids: torch.Tensor, inputs: dict[str, Any], turn: int) -> dict[str, torch.Tensor]:
    """What was said, with a user's few words behind it."""
    words = prompt(len(ids), 4 + turn, seed=20 + turn)["input_ids"].clamp(min=1)
    ids = torch.cat([ids, words], dim=1)
    num_new = ids.shape[1] - inputs["input_ids"].shape[1]
    mask = torch.cat([inputs["attention_mask"], words.new_ones(len(ids), num_new)], dim=1)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", few((*WINDOWED, *HYBRID), CHATTING))
def test_a_chat_on_one_cache(name: str, call: Call) -> None:
    """Whoever takes which of three turns, the text and the KV are the same."""
    model = tiny_model(name)
    expected = {n: chat(model, ["stock"] * n, call) for n in (2, 3)}
    for speakers in (("ours", "stock"), ("stock", "ours"), ("ours", "ours", "ours")):
        spec = doubting(expected[3][0], call.inputs)
        ids, kv = chat(model, speakers, call, spec)
        assert_same_ids(ids, expected[len(speakers)][0])
        assert_same_kv(kv, expected[len(speakers)][1])


@pytest.mark.parametrize("mode", MODES)
def test_only_the_new_ids_behind_a_cache(mode: str) -> None:
    """Stock takes the new ids alone where the mask covers the cache too."""
    model = tiny_model()
    first = prompt(1, 12)

    def fresh() -> dict[str, Any]:
        kv = DynamicCache(config=model.config)
        model(**first, **{KV: kv})
        return {KV: kv}

    words = {"input_ids": prompt(1, 5, seed=9)["input_ids"], "attention_mask": torch.ones(1, 17)}
    both = run_both(model, words, SelfSpec(), fresh=fresh, **MODES[mode])
    assert_same_kv(both.our_extras[KV], both.stock_extras[KV])


def embedded(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The prompt as embeddings, as a multimodal caller would bring it."""
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    return {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("with_ids", [False, True], ids=["embeds", "embeds-and-ids"])
@pytest.mark.parametrize("name", ["llama", "mistral", slow("gpt2"), slow("qwen3")])
def test_inputs_embeds(name: str, with_ids: bool, call: Call) -> None:
    model, inputs = tiny_model(name), call.inputs
    embeds = embedded(model, inputs)
    if with_ids:
        embeds["input_ids"] = inputs["input_ids"]
    stock = run(model, embeds, **call.options)
    full = stock.ids if with_ids else torch.cat([inputs["input_ids"], stock.ids], dim=1)
    spec = doubting(full, inputs) if with_ids else SelfSpec()
    run_both(model, embeds, spec, **call.options)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_position_ids_of_the_users_own(num_rows: int) -> None:
    model, inputs = tiny_model(), prompt(num_rows)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0) * 2
    run_both(model, {**inputs, "position_ids": positions}, **GREEDY)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_more_rows_than_prompts_on_a_cache(num_rows: int) -> None:
    options = SAMPLE | {"num_return_sequences": 2}
    run_both_on_a_kv(tiny_model("mistral"), prompt(num_rows), "configured", **options)


ENDS = [15, 26, 81]


def assert_close(ours: Any, stock: Any) -> None:
    """The same number of steps, and each one's scores but for rounding; both may be None."""
    assert (ours is None) == (stock is None)
    if stock is None:
        return
    assert isinstance(ours, tuple)
    assert len(ours) == len(stock)
    for a, b in zip(ours, stock, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, **ROUNDING)


RECORDED = {
    "all": {"output_scores": True, "output_logits": True, "eos_token_id": ENDS},
    "scores": {"output_scores": True},
}


DRAFTED = (*WINDOWED, "gpt2")


@pytest.mark.parametrize("asked", RECORDED.values(), ids=RECORDED)
@pytest.mark.parametrize(
    "name",
    [*DRAFTED, "bloom", *map(slow, ("qwen3-moe", "deepseek-v3", "gpt-oss", "gemma2"))],
)
def test_what_is_recorded(name: str, asked: dict[str, Any], call: Call) -> None:
    options = {"return_dict_in_generate": True, "drafts": name in DRAFTED, **asked, **call.options}
    both = run_both(tiny_model(name), call.inputs, **options)
    stock, ours = both.stock.output, both.ours.output
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert ours.keys() == stock.keys()
    assert_close(ours.scores, stock.scores)
    assert_close(ours.logits, stock.logits)
    assert_same_kv(kv_of(ours), kv_of(stock))
    assert ours.stats == both.stats


def test_without_the_dict_the_flags_mean_nothing() -> None:
    both = run_both(tiny_model(), prompt(3), output_scores=True, output_logits=True, **GREEDY)
    assert isinstance(both.ours.output, torch.Tensor)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("length", [1, slow(2), 5, slow(9), 14, slow(33)])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_kv_is_cut_where_the_text_ends(name: str, length: int, num_rows: int) -> None:
    """An accepted path that runs past the limit leaves nothing behind."""
    model, inputs = tiny_model(name), prompt(num_rows)
    spec = knowing(run(model, inputs, **GREEDY).ids, inputs, max_nodes=12)
    options = {"max_new_tokens": length, "return_dict_in_generate": True, **GREEDY}
    both = run_both(model, inputs, spec, drafts=False, **options)
    kv = kv_of(both.ours.output)
    assert kv.get_seq_length() == NUM_COLUMNS + length - 1
    assert_same_kv(kv, kv_of(both.stock.output))
