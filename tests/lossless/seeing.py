"""Tiny models that read images, one of each kind, and prompts with an image for them."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from tests.fakes import prompt
from tests.zoo import NO_SPECIAL, PAD, VOCAB
from tools.census_families.inputs import medium
from tools.census_families.shrink import open_gates, small_config

IMAGE, START = VOCAB - 1, VOCAB - 2  # an image's place, and what Qwen puts before it
_IDS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "vision_start_token_id": START,
    "video_token_id": VOCAB - 3,
}
_TEXT = NO_SPECIAL | {"bos_token_id": 1, "initializer_range": 0.3, "vocab_size": VOCAB}

_KINDS = {
    "llava": "llava",
    "gemma3": "gemma3",  # The tokens of an image see each other.
    "qwen2-vl": "qwen2_vl",  # Positions have four rows.
    "qwen3-5": "qwen3_5",  # Running states.
    "mllama": "mllama",  # Some layers look at the images in each step.
    "git": "git",  # Images have columns in the KV, and no ids.
}
SEEING = {name: kind for name, kind in _KINDS.items() if kind in CONFIG_MAPPING}


def seeing_config(kind: str) -> Any:
    """A config of the census, with the ids and the vocabulary of our texts."""
    config = small_config(kind)
    if kind == "llava":
        config.vision_config.image_size = 8  # An image has four places.
    for name, value in _TEXT.items():
        setattr(config.get_text_config(), name, value)
    for name, value in _IDS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


@cache
def seeing_model(name: str) -> Any:
    """A random model, made once."""
    auto = AutoModelForCausalLM if name == "git" else AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = auto.from_config(seeing_config(SEEING[name])).eval()
        open_gates(model)
    model.generation_config.pad_token_id = PAD
    return model


def prompt_with_image(name: str, num_rows: int = 1, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch with another image in each row, left-padded unevenly."""
    model, inputs = seeing_model(name), prompt(num_rows, 21, seed=seed)
    form, num_places = medium(model, "image")
    ids = inputs["input_ids"].clamp(max=VOCAB - 4)
    if num_places:
        ids[:, 9], ids[:, 10 : 10 + num_places] = START, IMAGE
    inputs |= {name: torch.cat([value] * num_rows) for name, value in form.items()}
    noise = torch.Generator().manual_seed(5)
    inputs["pixel_values"] = torch.randn(inputs["pixel_values"].shape, generator=noise)
    takes = signature(model.forward).parameters
    for types in ("token_type_ids", "mm_token_type_ids"):
        if types in takes:
            inputs[types] = (ids == IMAGE).int()
    if "cross_attention_mask" in takes:
        tiles = inputs["aspect_ratio_mask"][:, None]
        inputs["cross_attention_mask"] = (ids != PAD).long()[..., None, None] * tiles
    return {**inputs, "input_ids": ids}
