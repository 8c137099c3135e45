"""Every way into selfspec gives stock's text, and none leaves anything on the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, pipeline

from selfspec import SelfSpec, UnsupportedError, attach, detach
from tests.fakes import attached_model, new_model, prompt, tiny_model, tiny_tokenizer, with_lora
from tests.lossless.same import (
    GREEDY,
    MODES,
    NUM_COLUMNS,
    NUM_NEW,
    SAMPLE,
    Call,
    assert_clean,
    assert_same_ids,
    in_threads,
    recorded_forwards,
    run,
    run_both,
    slow,
)
from tests.lossless.test_same_streamers import Recorder


@pytest.mark.parametrize("entrance", ["assistant", "custom_generate", "hub"])
def test_entrances(entrance: str, call: Call, modules_cache: Path) -> None:
    model, options = attach(new_model()), {"fresh": lambda: {"streamer": Recorder()}}
    both = run_both(
        model, call.inputs, entrance=entrance, eos_token_id=[15, 81], **options, **call.options
    )
    assert both.stats.tokens_per_step > 1.2
    # the prompt, the tokens, the end
    num_told = 1 + both.stock.ids.shape[1] - NUM_COLUMNS + 1
    assert len(both.our_extras["streamer"].told) == num_told
    assert_clean(detach(model))


@pytest.mark.parametrize(
    ("entrance", "num_rows", "eos"),
    [("assistant", 1, None), ("hub", 3, 2), slow("assistant", 3, 2), slow("hub", 1, None)],
)
@pytest.mark.parametrize("given_in", ["argument", "config", "model"])
def test_stop_strings(
    given_in: str, entrance: str, eos: int | None, num_rows: int, modules_cache: Path
) -> None:
    model, inputs, tokenizer = attach(new_model("olmo2")), prompt(num_rows), tiny_tokenizer()
    text = tokenizer.decode(run(model, inputs, **GREEDY).ids[-1, NUM_COLUMNS:])
    options: dict[str, Any] = GREEDY | {"eos_token_id": eos, "tokenizer": tokenizer}
    if given_in == "argument":
        options["stop_strings"] = text[6:9]
    elif given_in == "config":
        options["generation_config"] = GenerationConfig(stop_strings=[text[6:9]], pad_token_id=0)
    else:
        model.generation_config.stop_strings = [text[6:9]]
    both = run_both(model, inputs, entrance=entrance, drafts=False, **options)
    assert both.ours.ids.shape[1] < NUM_COLUMNS + NUM_NEW or num_rows > 1


def test_a_bare_callable_needs_an_attached_model() -> None:
    """transformers hands it neither streamer nor tokenizer, and a reader would wait for ever."""
    model, inputs, tokenizer = tiny_model("olmo2"), prompt(), tiny_tokenizer()
    with recorded_forwards(model) as widths, pytest.raises(UnsupportedError, match="attach"):
        model.generate(**inputs, custom_generate=SelfSpec(), max_new_tokens=4, **GREEDY)
    assert widths == []
    stops = {"stop_strings": ["th", "ca"], "tokenizer": tokenizer}
    run_both(model, inputs, **stops, **GREEDY)


def test_attached_without_assistant_is_stock() -> None:
    stock, model = run(tiny_model(), prompt(), **SAMPLE), attach(new_model())
    with recorded_forwards(model) as widths:
        ours = run(model, prompt(), **SAMPLE)
    assert_same_ids(ours.ids, stock.ids)
    assert torch.equal(ours.rng_state, stock.rng_state)
    assert widths == [NUM_COLUMNS] + [1] * (NUM_NEW - 1)


def test_a_copy_of_an_attached_model_drafts_for_itself() -> None:
    model = attach(new_model())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_output_embeddings().weight.neg_()
    run_both(twin, prompt(), entrance="assistant", **GREEDY)
    run_both(model, prompt(), entrance="assistant", **GREEDY)


@pytest.mark.parametrize("mode", MODES)
def test_pipeline(mode: str) -> None:
    generator = pipeline("text-generation", model=attach(new_model()), tokenizer=tiny_tokenizer())
    words = ["the cat sat on", "that rat"]
    texts, spec = [], SelfSpec()
    for extra in ({}, {"assistant": spec}, {"custom_generate": spec}):
        torch.manual_seed(0)
        texts.append(generator(words, max_new_tokens=20, batch_size=2, **MODES[mode], **extra))
    attach(generator.model, spec)
    torch.manual_seed(0)
    texts.append(generator(words, max_new_tokens=20, batch_size=2, **MODES[mode]))
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert spec.total_stats.num_calls == 3
    assert spec.stats.disabled_reason is None


# peft 0.21 reads a name that transformers 5.23 has deprecated
PEFT_NOTE = "ignore:.*is_gradient_checkpointing.*:FutureWarning"


@pytest.mark.parametrize("where", ["wrapper", slow("inner"), None])
@pytest.mark.filterwarnings(PEFT_NOTE)
def test_lora(where: str | None, call: Call) -> None:
    """Attached to the wrapper or to the model inside, or handed over as a callable."""
    lora, inputs = with_lora(new_model()), call.inputs
    entrance = "assistant" if where else "custom_generate"
    bare = run(tiny_model(), inputs, **call.options)
    if where:
        attach(lora if where == "wrapper" else lora.get_base_model())
    both = run_both(lora, inputs, entrance=entrance, **call.options)
    assert both.stats.tokens_per_step > 1.2
    assert not torch.equal(both.ours.ids, bare.ids)
    with lora.disable_adapter():
        off = run_both(lora, inputs, entrance=entrance, **call.options)
    assert_same_ids(off.ours.ids, bare.ids)


def test_two_threads_share_a_spec_and_a_model() -> None:
    model, spec = attached_model("qwen2"), SelfSpec()
    prompts = [prompt(1 + seed % 2, 9 + seed, seed=seed) for seed in range(4)]
    stock = [run(model, inputs, **GREEDY).ids for inputs in prompts]
    ours: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        options = {"assistant": spec, "max_new_tokens": NUM_NEW}
        ours[index] = model.generate(**prompts[index], **options, **GREEDY)

    in_threads(work, 4, 2)
    for index, expected in enumerate(stock):
        assert_same_ids(ours[index], expected)
    assert spec.total_stats.num_calls == 4
    assert_clean(detach(model))
    attach(model)


def test_weights_in_training_mode_are_stocks_business() -> None:
    """generate() does not call eval(); dropout of a model in training would be random anyway."""
    model = new_model("llama", attention_dropout=0.0)
    model.train()
    run_both(model, prompt(3), **SAMPLE)
