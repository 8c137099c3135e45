"""Prompts with images, and text that a processor has made: stock's text, drafted where possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from selfspec import SelfSpec
from selfspec.compat.generation import KV
from tests.fakes import prompt, tiny_model
from tests.lossless.same import GREEDY, MODES, Call, run_both, slow
from tests.lossless.seeing import IMAGE, SEEING, prompt_with_image, seeing_model
from tests.zoo import PAD, VOCAB
from tools.census_families.inputs import media_inputs
from tools.census_families.shrink import small_model

DRAFTED = [name for name in SEEING if name not in ("git", "mllama")]
CHAINS = ("qwen3-5",)
SHORT: dict[str, Any] = {"max_new_tokens": 14}

COLUMNS = "its KV has columns that are no tokens, such as images"
OF_MLLAMA = "ignore:`hidden_state` is deprecated:FutureWarning"  # of its own code in 5.17


def by_drafts(name: str, inputs: dict[str, Any], **options: Any) -> None:
    """Stock's text, by trees or, where a model takes none, by chains."""
    both = run_both(seeing_model(name), inputs, drafts=False, **SHORT, **options)
    reason = both.stats.disabled_reason
    assert reason is None or (name in CHAINS and "chains instead of trees" in reason), reason
    assert both.stats.num_nodes > both.stats.num_steps


def with_types(name: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Texts, of which some ids may stand for an image, as a processor hands them over."""
    types = {"token_type_ids", "mm_token_type_ids"} & prompt_with_image(name).keys()
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    return inputs | {each: (ids == IMAGE).int() for each in types}


@pytest.mark.parametrize("name", DRAFTED)
def test_an_image_in_each_row(name: str, call: Call) -> None:
    by_drafts(name, prompt_with_image(name, call.num_rows), **call.options)


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("mode", ["greedy", pytest.param("sample", marks=pytest.mark.slow)])
def test_text_alone_from_a_processor(name: str, mode: str) -> None:
    by_drafts(name, with_types(name, prompt(2)["input_ids"].clamp(max=VOCAB - 4)), **MODES[mode])


@pytest.mark.parametrize("name", DRAFTED)
def test_three_samples_of_one_prompt(name: str) -> None:
    by_drafts(name, prompt_with_image(name), num_return_sequences=3, **MODES["sample"])


@pytest.mark.parametrize("name", [*DRAFTED, "mllama"])
@pytest.mark.filterwarnings(OF_MLLAMA)
def test_an_image_in_a_first_turn_and_text_in_a_second(name: str) -> None:
    """In Mllama's second call, only the lengths of the layers of its KV tell of the image."""
    model = seeing_model(name)

    def first_turn() -> dict[str, Any]:
        cache, inputs = DynamicCache(config=model.config.get_text_config()), prompt_with_image(name)
        model.generate(**inputs, **{KV: cache}, max_new_tokens=1, do_sample=False)
        return {KV: cache}

    ids = torch.cat([prompt_with_image(name)["input_ids"], prompt(seed=4)["input_ids"]], dim=1)
    inputs = with_types(name, ids)
    if name in DRAFTED:
        by_drafts(name, inputs, fresh=first_turn, **GREEDY)
    else:
        both = run_both(model, inputs, fresh=first_turn, drafts=False, **GREEDY)
        assert (both.stats.mode, both.stats.disabled_reason) == ("plain", COLUMNS)


@pytest.mark.parametrize("name", DRAFTED)
def test_a_prompt_in_chunks(name: str) -> None:
    """Stock refuses to cut raw images in chunks, and what it refuses, so do we."""
    inputs, model = prompt_with_image(name), seeing_model(name)
    try:
        model.generate(**inputs, prefill_chunk_size=6, max_new_tokens=2)
    except Exception as refused:
        with pytest.raises(type(refused)):
            by_drafts(name, inputs, prefill_chunk_size=6, **GREEDY)
    else:
        by_drafts(name, inputs, prefill_chunk_size=6, **GREEDY)


@pytest.mark.parametrize("name", [name for name in SEEING if name not in DRAFTED])
@pytest.mark.filterwarnings(OF_MLLAMA)
def test_images_with_columns_of_their_own(name: str) -> None:
    for num_rows in (1, 2):
        inputs = prompt_with_image(name, num_rows)
        both = run_both(seeing_model(name), inputs, drafts=False, **SHORT, **GREEDY)
        found = both.stats.disabled_reason or ""
        # With transformers 5.17, GIT fails on every trial.
        of_mllama = "its plain steps get 'cross_attention_mask', and drafts do not"
        assert found in (COLUMNS, of_mllama) or "trying GitForCausalLM fails" in found


@pytest.mark.parametrize(
    ("unreadable", "with_draft_model"), [(VOCAB + 3, False), (-200, True), slow(VOCAB + 3, True)]
)
def test_ids_that_only_mark_the_place_of_an_image(unreadable: int, with_draft_model: bool) -> None:
    """The context names them after the token in front of them, and no model could embed them."""
    model, inputs = tiny_model(), prompt(2)
    ids = inputs["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    ids[:, -7], ids[:, -6:-3] = 7, unreadable
    draft_model = tiny_model("gpt2") if with_draft_model else None
    run_both(
        model,
        {**inputs, "inputs_embeds": embeds},
        SelfSpec(budget="fixed", draft_model=draft_model),
        sequence_bias={(7,): 100.0},
        **GREEDY,
    )


def test_a_decoder_that_looks_at_its_image_in_each_step() -> None:
    """That of BLIP calls itself no encoder-decoder, and makes a KV cache of two parts."""
    model = small_model("blip")
    both = run_both(model, media_inputs(model), drafts=False, **SHORT, **GREEDY)
    assert "'encoder_hidden_states'" in str(both.stats.disabled_reason)
