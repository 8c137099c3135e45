"""What can't be served is refused before any forward; what can't be drafted for is plain."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache, T5Config, T5ForConditionalGeneration

from selfspec import AttachError, ConfigError, SelfSpec, UnsupportedError, attach, detach
from selfspec.compat.generation import KV
from tests.fakes import FutureSource, attached_model, lut_of, new_model, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    NUM_NEW,
    ROUNDING,
    SAMPLE,
    Call,
    assert_clean,
    recorded_forwards,
    run,
    run_both,
    through,
)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "num_beams=1"),
    "beam-sampling": ({"num_beams": 2, "do_sample": True}, "num_beams=1"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=None"),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 5}, "prompt_lookup_num_tokens=None"),
    "dola": ({"dola_layers": "low"}, "dola_layers=None"),
    "early-exit": ({"assistant_early_exit": 1}, "assistant_early_exit=None"),
}


@pytest.mark.parametrize("entrance", ["assistant", "custom_generate"])
@pytest.mark.parametrize(("options", "fix"), REFUSED.values(), ids=REFUSED)
def test_other_modes_are_refused(options: dict[str, Any], fix: str, entrance: str) -> None:
    model = attached_model()
    with recorded_forwards(model) as widths, pytest.raises(UnsupportedError) as caught:
        run(model, prompt(), **{entrance: SelfSpec()}, **{**GREEDY, **options})
    assert widths == []
    message = str(caught.value)
    assert fix in message
    name, value = next(iter(options.items()))
    assert f"{name}={value!r}" in message


def test_assistant_and_custom_generate_are_refused_together() -> None:
    spec = SelfSpec()
    with pytest.raises(UnsupportedError, match="custom_generate"):
        run(attached_model(), prompt(), assistant=spec, custom_generate=spec, **GREEDY)


@pytest.mark.parametrize("entrance", ["assistant", "custom_generate"])
def test_encoder_decoder_models_are_refused(entrance: str) -> None:
    config = T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = attach(T5ForConditionalGeneration(config).eval())
    with recorded_forwards(model) as widths, pytest.raises(UnsupportedError, match="encoder-dec"):
        run(model, prompt(), **{entrance: SelfSpec()}, **GREEDY)
    assert widths == []


@pytest.mark.parametrize("assistant", ["string", True, 3, object(), SelfSpec, tiny_model("qwen2")])
def test_an_assistant_of_another_kind_is_refused(assistant: Any) -> None:
    model = attached_model()
    with recorded_forwards(model) as widths, pytest.raises(AttachError, match="SelfSpec"):
        run(model, prompt(), assistant=assistant, **GREEDY)
    assert widths == []


@pytest.mark.parametrize("thing", [object(), None, "model", 3, type(tiny_model()), torch.nn.ReLU()])
def test_attach_refuses_what_has_no_generate(thing: Any) -> None:
    with pytest.raises(AttachError, match=r"generate\(\)"):
        attach(thing)


DICT = {"return_dict_in_generate": True}
PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "no-kv": ({"use_cache": False}, "use_cache=False leaves no KV cache"),
    "static": ({"cache_implementation": "static"}, "a KV cache of type Static"),
    "attentions": ({"output_attentions": True, **DICT}, "output_attentions=True asks for"),
    "hidden-states": ({"output_hidden_states": True, **DICT}, "output_hidden_states=True asks"),
}


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize(("options", "reason"), PLAIN.values(), ids=PLAIN)
def test_plain_calls(options: dict[str, Any], reason: str, name: str, call: Call) -> None:
    model = tiny_model(name, "eager")
    both = run_both(model, call.inputs, drafts=False, **call.options, **options)
    assert reason in str(both.stats.disabled_reason)
    assert both.stats.tokens_per_step == 1
    if options.get("output_hidden_states"):
        ours, stock = both.ours.output.hidden_states, both.stock.output.hidden_states
        assert len(ours) == len(stock)
        assert torch.allclose(ours[-1][-1], stock[-1][-1], **ROUNDING)


@pytest.mark.parametrize(("options", "reason"), PLAIN.values(), ids=PLAIN)
def test_plain_calls_under_strict(options: dict[str, Any], reason: str) -> None:
    model, said = tiny_model("llama", "eager"), f"strict=True .*{reason}"
    with recorded_forwards(model) as widths, pytest.raises(UnsupportedError, match=said):
        run(model, prompt(), custom_generate=SelfSpec(strict=True), **GREEDY, **options)
    assert prompt()["input_ids"].shape[1] not in widths
    assert_clean(model)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_static_cache_that_was_handed_in(num_rows: int) -> None:
    static = partial(StaticCache, config=tiny_model().config, max_cache_len=80)
    options = {"fresh": lambda: {KV: static()}, "drafts": False, **SAMPLE}
    both = run_both(tiny_model(), prompt(num_rows), **options)
    assert "StaticCache" in str(both.stats.disabled_reason)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_cache_of_the_users_own_class(num_rows: int) -> None:
    class OwnCache(DynamicCache):
        """May do anything in `update`."""

    options = {"fresh": lambda: {KV: OwnCache()}, "drafts": False, **GREEDY}
    both = run_both(tiny_model(), prompt(num_rows), **options)
    assert "OwnCache" in str(both.stats.disabled_reason)
    assert both.our_extras[KV].get_seq_length() == 17 + NUM_NEW - 1


def test_output_attentions_without_the_dict_are_drafted_for_or_not_but_the_same() -> None:
    run_both(tiny_model("llama", "eager"), prompt(), output_attentions=True, drafts=False, **GREEDY)


def test_an_attention_that_takes_no_mask_falls_back() -> None:
    """Flex attention wants block masks: no tree, and the reason says so."""
    model = new_model()
    model.config._attn_implementation = "flex_attention"
    ability = SelfSpec().ability(model)
    assert ability.mode != "tree"
    assert "flex_attention" in str(ability.reason)


@pytest.mark.parametrize("learning", ["session", "request", "frozen"])
def test_a_refused_call_teaches_nothing(learning: str) -> None:
    spec = SelfSpec(learning=learning)
    with pytest.raises(UnsupportedError):
        run(tiny_model(), prompt(), custom_generate=spec, num_beams=3, **GREEDY)
    lut = lut_of(spec, 97)
    assert (lut.rows.token_ids == -1).all()


# -- what was ignored in silence ---------------------------------------------------------------


@pytest.mark.parametrize("entrance", ["assistant", "custom_generate", "hub"])
def test_a_paged_cache_is_refused_by_name(entrance: str, modules_cache: Any) -> None:
    extra = through(entrance, SelfSpec())
    with pytest.raises(UnsupportedError, match="cache_implementation='paged' can't be drafted for"):
        run(attached_model(), prompt(), cache_implementation="paged", **extra, **GREEDY)


def test_generate_batch_is_refused_by_name() -> None:
    model = attached_model()
    with pytest.raises(UnsupportedError, match=r"generate_batch\(\) can't draft"):
        model.generate_batch([[5, 6, 7]], assistant=SelfSpec())


def test_generate_batch_without_an_assistant_is_stocks(monkeypatch) -> None:
    model = attach(new_model())
    kind = type(model)
    monkeypatch.setattr(kind, "generate_batch", lambda self, inputs: (self, inputs))
    assert model.generate_batch([[5]]) == (model, [[5]])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiled_model_is_attached_to_the_model_inside() -> None:
    model, inputs = new_model(), prompt()
    stock = run(model, inputs, **GREEDY)
    compiled = torch.compile(model)
    assert attach(compiled) is compiled
    assert torch.equal(run(compiled, inputs, **GREEDY).ids, stock.ids)
    ours = run(compiled, inputs, assistant=SelfSpec(), **GREEDY)
    assert torch.equal(ours.ids, stock.ids)
    detach(compiled)
    assert_clean(model)
    assert torch.equal(run(compiled, inputs, **GREEDY).ids, stock.ids)


class OldSource(FutureSource):
    """As sources were written for version 0.1."""

    observe_pairs = None


def test_a_source_without_a_method_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"without observe_pairs\(\).*was named observe_places"):
        SelfSpec(extra_sources=[OldSource([[1]])])


def test_a_prompt_without_a_token() -> None:
    empty = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="the prompt must have at least one token"):
        attached_model().generate(input_ids=empty, assistant=SelfSpec(), max_new_tokens=4)


def test_a_recurrent_model_is_named() -> None:
    spec = SelfSpec()
    run(tiny_model("mamba"), prompt(), custom_generate=spec, **GREEDY)
    assert "MambaForCausalLM keeps a state of its own" in str(spec.stats.disabled_reason)


def test_a_reason_is_logged_once_for_each_model(caplog) -> None:
    spec, model = SelfSpec(), tiny_model()
    for _ in range(2):
        run(model, prompt(), custom_generate=spec, use_cache=False, **GREEDY)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("selfspec", "WARNING")
    assert "LlamaForCausalLM is not drafted for as asked: use_cache=False" in record.getMessage()
    cache = StaticCache(config=model.config, max_cache_len=200)
    run(model, prompt(), custom_generate=spec, **{KV: cache}, **GREEDY)
    assert "StaticCache" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2


def test_a_forward_that_can_not_be_had_is_logged_as_that(caplog) -> None:
    """The model is drafted for all the same."""
    run(tiny_model(), prompt(), custom_generate=SelfSpec(forward="graph"), **GREEDY)
    (record,) = caplog.records
    assert "LlamaForCausalLM is not run as asked: a CPU captures no graphs" in record.getMessage()
