"""With a draft model the text is stock's, whatever the draft model says."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eval.papers.edgellm import Fallback
from selfspec import ConfigError, SelfSpec, VocabularyError
from selfspec.draft.sources.worth import SourceWorth
from tests.fakes import VOCAB, attached_model, new_model, prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import FIXED, GREEDY, MODES, Call, refused, run_both


@cache
def noisy_copy(noise: float) -> PreTrainedModel:
    """A model that says nearly what `tiny_model()` says."""
    twin = copy.deepcopy(tiny_model())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in twin.parameters():
            weights += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    return twin


DRAFT_MODELS = {
    "copy": lambda: noisy_copy(0.0),
    "noisy": lambda: noisy_copy(0.05),
    "hostile": lambda: tiny_model("gemma3"),
    "more tokens": lambda: new_model("qwen2", vocab_size=VOCAB + 40),
    "fewer tokens": lambda: new_model("qwen2", vocab_size=VOCAB - 40),
    "few positions": lambda: new_model("gpt2", n_positions=30),
}


@pytest.mark.parametrize("kind", DRAFT_MODELS)
def test_the_text_is_stocks(kind: str, call: Call) -> None:
    """Of the hostile pair, both have windows."""
    model = tiny_model("mistral" if kind == "hostile" else "llama")
    spec = SelfSpec(draft_model=DRAFT_MODELS[kind](), **FIXED)
    both = run_both(model, call.inputs, spec, max_new_tokens=20, **call.options)
    assert both.stats.num_draft_forwards > call.num_rows
    assert both.stats.drafted_by_source["draft model"] > 0
    if kind == "copy" and call.mode == "greedy":
        assert both.stats.tokens_per_step > 3


@pytest.mark.parametrize("name", ["measured", "threshold"])
def test_other_budgets_and_no_memory_of_earlier_calls(name: str) -> None:
    budget: Any = Fallback() if name == "threshold" else name
    spec = SelfSpec(draft_model=noisy_copy(0.05), budget=budget, learning="request", max_nodes=8)
    for options in MODES.values():
        both = run_both(tiny_model(), prompt(2), spec, **options)
        assert both.stats.accepted_by_source["draft model"] > 0


def test_statistics_name_one_that_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = tiny_model(), SelfSpec(draft_model=noisy_copy(0.0), **FIXED)
    assert run_both(model, prompt(), spec, **GREEDY).stats.draft_model_reason is None
    monkeypatch.setattr(SourceWorth, "pays", lambda *_args: False)
    stats = run_both(model, prompt(), spec, **GREEDY).stats
    assert stats.num_draft_forwards == 0
    assert str(stats.draft_model_reason).startswith(f"0 looks in {stats.num_steps} steps")
    assert "its draft model drafted little or nothing: 0 looks" in str(stats)


@pytest.mark.parametrize("name", ["bloom", "gemma3"])
def test_other_architectures(name: str) -> None:
    """The first gets chains."""
    spec = SelfSpec(draft_model=tiny_model(), **FIXED)
    options = {"max_new_tokens": 12, **GREEDY}
    both = run_both(tiny_model(name), prompt(2), spec, drafts=False, **options)
    assert both.stats.drafted_by_source["draft model"] > 0


@pytest.mark.parametrize("entrance", ["assistant", "custom_generate", "hub"])
def test_an_assistant_model_drafts_for_one_call(entrance: str, modules_cache: Any) -> None:
    model, spec = attached_model(), SelfSpec(**FIXED)
    told = {"told": lambda _: {"assistant_model": noisy_copy(0.0)}}
    both = run_both(model, prompt(), spec, entrance=entrance, **told, **GREEDY)
    assert both.stats.accepted_by_source["draft model"] > 12
    run_both(model, prompt(), spec, entrance=entrance, **GREEDY)
    assert spec.stats.num_draft_forwards == 0


def test_a_model_that_cannot_draft_is_refused() -> None:
    t5 = new_model("t5")
    for wrong in (t5, "small", type(tiny_model())):
        with pytest.raises(ConfigError, match="draft_model must be"):
            SelfSpec(draft_model=wrong)
        refused("draft_model", ConfigError, assistant=SelfSpec(), assistant_model=wrong)
    refused("to read trees", assistant=SelfSpec(draft_model=tiny_model("bloom")))
    large = SelfSpec(draft_model=new_model(vocab_size=VOCAB + 1024))
    refused(f"{VOCAB + 1024} tokens", VocabularyError, assistant=large)
    options = {"assistant": SelfSpec(), "assistant_model": tiny_model("qwen2")}
    refused("assistant_tokenizer", assistant_tokenizer=tiny_tokenizer(), **options)
    embeds = attached_model().get_input_embeddings()(prompt()["input_ids"]).detach()
    spec = SelfSpec(draft_model=tiny_model("qwen2"))
    refused("as token ids", inputs={"inputs_embeds": embeds}, assistant=spec)
