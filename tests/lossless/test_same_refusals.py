"""What can't be served is refused before any forward; what can't be drafted for is plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from selfspec import AttachError, SelfSpec, attach, detach
from selfspec.compat.generation import KV
from tests.fakes import new_model, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    NUM_COLUMNS,
    NUM_NEW,
    ROUNDING,
    SAMPLE,
    Call,
    assert_clean,
    refused,
    run,
    run_both,
)

REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=3": {"num_beams": 3},
    "num_beams=2": {"num_beams": 2, "do_sample": True},
    "penalty_alpha=0.6": {"penalty_alpha": 0.6, "top_k": 4},
    "prompt_lookup_num_tokens=5": {"prompt_lookup_num_tokens": 5},
    "dola_layers='low'": {"dola_layers": "low"},
    "assistant_early_exit=1": {"assistant_early_exit": 1},
    "cache_implementation='paged'": {"cache_implementation": "paged"},
}
if hasattr(GenerationConfig(), "speculation_type"):  # Not in transformers 5.17.
    REFUSED["speculation_type='dflash'"] = {"speculation_type": "dflash"}
    REFUSED["assistant_ensemble_weight=0.5"] = {"assistant_ensemble_weight": 0.5}


@pytest.mark.parametrize("entrance", ["assistant", "custom_generate"])
@pytest.mark.parametrize(("named", "options"), REFUSED.items(), ids=REFUSED)
def test_other_modes_are_refused(named: str, options: dict[str, Any], entrance: str) -> None:
    refused(named, **{entrance: SelfSpec()}, **options)


def test_assistant_and_custom_generate_are_refused_together() -> None:
    refused("custom_generate", assistant=SelfSpec(), custom_generate=SelfSpec())


def test_a_prompt_without_a_token_is_refused() -> None:
    empty = {"input_ids": torch.zeros(1, 0, dtype=torch.long)}
    refused("at least one token", inputs=empty, assistant=SelfSpec())


@pytest.mark.parametrize("assistant", ["string", True, 3, object(), SelfSpec, tiny_model("qwen2")])
def test_an_assistant_of_another_kind_is_refused(assistant: Any) -> None:
    refused("SelfSpec", AttachError, assistant=assistant)


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


class OwnCache(DynamicCache):
    """May do anything in `update`."""


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    ("name", "new_cache"),
    [
        ("StaticCache", lambda: StaticCache(config=tiny_model().config, max_cache_len=80)),
        ("OwnCache", OwnCache),
    ],
)
def test_a_cache_of_another_kind(name: str, new_cache: Callable[[], Any], num_rows: int) -> None:
    options = {"fresh": lambda: {KV: new_cache()}, "drafts": False, **SAMPLE}
    both = run_both(tiny_model(), prompt(num_rows), **options)
    assert name in str(both.stats.disabled_reason)
    assert both.our_extras[KV].get_seq_length() == NUM_COLUMNS + NUM_NEW - 1


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


def test_a_reason_is_logged_once_for_each_model(caplog) -> None:
    spec, model = SelfSpec(), tiny_model()
    for _ in range(2):
        run(model, prompt(), custom_generate=spec, use_cache=False, **GREEDY)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("selfspec", "WARNING")
    assert "LlamaForCausalLM is not drafted for: use_cache=False" in record.getMessage()
    cache = StaticCache(config=model.config, max_cache_len=200)
    run(model, prompt(), custom_generate=spec, **{KV: cache}, **GREEDY)
    assert "StaticCache" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2


def test_a_forward_that_can_not_be_had_is_logged_as_that(caplog, request) -> None:
    """The model is drafted for all the same."""
    if request.config.getoption("--recorded"):
        pytest.skip("there it can be had")
    run(tiny_model(), prompt(), custom_generate=SelfSpec(forward="graph"), **GREEDY)
    (record,) = caplog.records
    assert "is run eagerly: a CPU captures no graphs" in record.getMessage()
