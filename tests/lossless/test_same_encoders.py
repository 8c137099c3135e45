"""Encoder-decoders get chains: texts, random states and KV are those of stock."""

from __future__ import annotations

from functools import cache, partial
from itertools import dropwhile
from operator import not_
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from selfspec import SelfSpec, attach
from selfspec.compat.generation import KV, kv_of
from selfspec.weights.packing import linears_of
from tests.fakes import FutureSource, of_library, tiny_tokenizer
from tests.fakes import new_model as random_model
from tests.lossless.same import FIXED, GREEDY, MODES, SAMPLE, assert_same_kv, run, run_both, slow
from tests.sessions import TextSession
from tests.zoo import PAD, START, VOCAB

KINDS = ("t5", "bart", "whisper")


def new_model(kind: str) -> Any:
    model = random_model(kind)
    model.generation_config.max_length = None
    if kind == "whisper":
        model.generation_config.suppress_tokens = None
        model.generation_config.begin_suppress_tokens = None
    return attach(model)


shared_model = cache(new_model)


def inputs_for(kind: str, num_rows: int = 1) -> dict[str, torch.Tensor]:
    """Random texts or sounds; the rows of a batch of texts are padded at their right."""
    generator = torch.Generator().manual_seed(3)
    if kind == "whisper":
        return {"input_features": torch.randn(num_rows, 8, 32, generator=generator)}
    ids = torch.randint(3, VOCAB, (num_rows, 15), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, num_rows):
        ids[row, -3 * row :] = mask[row, -3 * row :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def knowing(ids: torch.Tensor, inputs: dict[str, Any], doubt: float = 0.1) -> SelfSpec:
    """Drafts of which most are right, after the text that the encoder has read."""
    first = inputs.get("decoder_input_ids", torch.full((len(ids), 1), START))
    if "input_features" in inputs:  # What Whisper returns begins with its answer.
        ids = torch.cat([first, ids], dim=1)
    read = inputs.get("input_ids", torch.zeros(len(ids), 0, dtype=torch.long))
    read = read.repeat_interleave(len(ids) // len(read), dim=0)
    texts = [
        [*filter(None, before), *dropwhile(not_, row)]
        for before, row in zip(read.tolist(), ids.tolist(), strict=True)
    ]
    return SelfSpec(extra_sources=[FutureSource(texts, doubt=doubt, chains=True)], **FIXED)


def check(
    kind: str, inputs: dict[str, Any], model: Any = None, doubt: float = 0.1, **options: Any
) -> Any:
    """The same as stock, by chains of which some drafts are accepted."""
    model = model or shared_model(kind)
    options = {"entrance": "assistant", **options}
    both = run_both(model, inputs, partial(knowing, doubt=doubt), drafts=False, **options)
    assert both.stats.mode == "chain"
    assert both.stats.disabled_reason == (
        "it is an encoder-decoder model; drafting chains instead of trees"
    )
    assert both.stats.num_steps < both.stats.num_new_tokens - len(both.ours.ids)
    return both


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_rows", "mode"), [(1, "greedy"), (3, "sample"), slow(1, "sample"), slow(3, "greedy")]
)
def test_texts_are_those_of_stock(kind: str, mode: str, num_rows: int) -> None:
    check(kind, inputs_for(kind, num_rows), **MODES[mode])


def test_pads_in_a_text_are_placed_as_in_plain_steps() -> None:
    """M2M-100 counts positions without pads in a forward, and with them in the KV.

    Rows move together, and no draft follows a pad: a wrong draft more, and none is ever accepted.
    """
    check("m2m", inputs_for("m2m", 2), doubt=0.0, sequence_bias={(PAD,): 6.0}, **SAMPLE)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_an_encoder_has_read_is_kept(kind: str) -> None:
    model, spec = shared_model(kind), SelfSpec(**FIXED, kept_kv="1MB")
    for _ in range(2):
        both = run_both(model, inputs_for(kind), spec, drafts=False, **GREEDY)
        assert both.stats.kept_reason == "an encoder reads its prompt"


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_prompts_in_a_session_that_keeps_what_was_read(kind: str) -> None:
    model, ids = shared_model(kind), inputs_for(kind)["input_ids"]
    stock = run(model, {"input_ids": ids}, **GREEDY).ids[0, 1:].tolist()
    options: dict[str, Any] = {"max_memory": "1GB", "keeps_kv": True}
    session = TextSession(model, tiny_tokenizer(), SelfSpec(**FIXED), **options)
    for index in range(2):
        session.submit(index, ids[0].tolist(), 0, {"max_new_tokens": len(stock), **GREEDY})
    answers = []
    while not session.is_empty:
        answers += session.work()
    assert [(answer.error, answer.ids) for answer in answers] == [(None, stock)] * 2


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_several_texts_of_one_prompt(kind: str) -> None:
    check(kind, inputs_for(kind), num_return_sequences=2, **SAMPLE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_may_be_given_a_text_of_its_own(kind: str) -> None:
    ids = torch.tensor([[2, 9, 31, 17, 9], [0, 0, 2, 8, 23]])
    text = {"decoder_input_ids": ids, "decoder_attention_mask": (ids > 0).long()}
    check(kind, {**inputs_for(kind, 2), **text}, **SAMPLE)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_what_is_returned_is_what_stock_returns(kind: str) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    both = check(kind, inputs_for(kind, 2), **asked, **SAMPLE)
    ours, stock = both.ours.output, both.stock.output
    assert isinstance(ours, type(stock))
    assert ours.keys() == stock.keys() - {"encoder_hidden_states", "encoder_attentions"}
    for mine, theirs in zip(ours.scores, stock.scores, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    for part in ("self_attention_cache", "cross_attention_cache"):
        assert_same_kv(getattr(kv_of(ours), part), getattr(kv_of(stock), part))


def test_rows_end_at_different_tokens() -> None:
    model, inputs = new_model("bart"), inputs_for("bart", 3)
    ids = run(model, inputs, **GREEDY).ids
    ends = [ids[0, 6].item(), ids[1, 11].item()]
    check("bart", inputs, model, eos_token_id=ends, **GREEDY)


def test_processors_that_read_what_the_encoder_has_read() -> None:
    looks = {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.5}
    check("t5", inputs_for("t5", 2), **looks, **SAMPLE)


def test_a_kv_cache_that_is_handed_in() -> None:
    model, inputs = new_model("bart"), inputs_for("bart")
    fresh = lambda: {KV: EncoderDecoderCache(DynamicCache(), DynamicCache())}  # noqa: E731
    both = check("bart", inputs, model, fresh=fresh, **GREEDY)
    ours, stock = both.our_extras[KV], both.stock_extras[KV]
    assert_same_kv(ours.self_attention_cache, stock.self_attention_cache)


def test_outputs_of_the_encoder_that_are_handed_in() -> None:
    model, inputs = new_model("t5"), inputs_for("t5")
    outputs = model.get_encoder()(**inputs)
    run_both(model, {"encoder_outputs": outputs}, SelfSpec(**FIXED), drafts=False, **GREEDY)


def test_a_static_kv_is_what_it_is_for_decoders() -> None:
    static = {"cache_implementation": "static", "drafts": False, **GREEDY}
    both = run_both(new_model("bart"), inputs_for("bart"), SelfSpec(), **static)
    assert both.stats.disabled_reason == "a KV cache of type StaticCache can't take a draft back"


def test_the_weights_of_an_encoder_are_never_packed() -> None:
    model = new_model("bart")
    assert not set(linears_of(model)) & set(model.get_encoder().modules())
    assert set(linears_of(model)) & set(model.get_decoder().modules())


def test_embeddings_that_transformers_does_not_find(monkeypatch: Any) -> None:
    """As in PP-FormulaNet."""
    model = new_model("bart")

    @of_library
    def not_found() -> None:
        raise NotImplementedError

    monkeypatch.setattr(model, "get_input_embeddings", not_found)
    check("bart", inputs_for("bart"), model, **GREEDY)


def test_experts_that_are_full_at_some_number_of_tokens_are_decoded_plainly() -> None:
    """In a forward over several tokens, those of Switch Transformers may leave some out."""
    model = new_model("switch")
    both = run_both(model, inputs_for("t5"), SelfSpec(), drafts=False, **GREEDY)
    assert both.stats.disabled_reason == "its experts take a limited number of a forward's tokens"


def test_a_decoder_that_sees_later_tokens_is_decoded_plainly(monkeypatch: Any) -> None:
    """A fault of a model's own is found by the trial, as in a decoder."""
    model = new_model("t5")
    for block in model.decoder.block:
        monkeypatch.setattr(block.layer[0].SelfAttention, "is_decoder", False, raising=True)
    monkeypatch.setattr(model.decoder, "is_decoder", False)
    monkeypatch.setattr(model.decoder.config, "is_decoder", False)
    assert SelfSpec().support(model).mode == "plain"
