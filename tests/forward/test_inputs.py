"""Which arguments of a prompt keep drafts from it, as names and a config show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from selfspec.compat.generation import KV
from selfspec.forward.inputs import missing_inputs_reason
from tests.fakes import prompt, tiny_model
from tests.lossless.seeing import prompt_with_image, seeing_model


def reason_of(model: Any, inputs: dict[str, Any]) -> str | None:
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("a forward was run"))
    try:
        ids = inputs.pop("input_ids")
        return missing_inputs_reason(model, ids, {KV: DynamicCache(), "use_cache": True, **inputs})
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_text_alone_needs_nothing_more(name: str) -> None:
    assert reason_of(tiny_model(name), prompt(2)) is None


@pytest.mark.parametrize("value", [0, 1])
def test_types_of_tokens_are_embedded_in_each_step(value: int) -> None:
    types = {"token_type_ids": torch.full_like(prompt()["input_ids"], value)}
    reason = reason_of(tiny_model("gpt2"), prompt() | types)
    assert reason == "its plain steps get 'token_type_ids', and drafts do not"


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2-vl"])
def test_an_image_whose_places_have_ids_is_read_with_the_prompt(name: str) -> None:
    assert reason_of(seeing_model(name), prompt_with_image(name)) is None


def test_an_image_without_ids_has_columns_of_its_own() -> None:
    reason = reason_of(seeing_model("git"), prompt_with_image("git"))
    assert reason == "its KV has columns that are no tokens, such as images"
