"""Tiny models that read images, one of each kind, and prompts with an image for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from tests.fakes import prompt
from tests.zoo import ARCHITECTURES, NO_SPECIAL, PAD, VOCAB

IMAGE, START = VOCAB - 1, VOCAB - 2  # an image's place, and what Qwen puts before it
_NUM_PLACES = 4

_DENSE = ARCHITECTURES["llama"].config | NO_SPECIAL
_CLIP = {
    "hidden_size": 16,
    "image_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
    "projection_dim": 16,
    "initializer_range": 0.3,
}
_QWEN_EYES = {
    "depth": 1,
    "hidden_size": 16,
    "in_channels": 3,
    "initializer_range": 0.3,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_IDS = {"image_token_id": IMAGE, "vision_start_token_id": START, "video_token_id": VOCAB - 3}
_IN_THREE = {"rope_theta": 10_000.0, "rope_type": "default", "mrope_section": [2, 1, 1]}


class Seeing(NamedTuple):
    """How to make a tiny model that reads images, and what its processor would give it."""

    model_type: str
    config: dict[str, Any]
    images: Callable[[torch.Tensor], dict[str, torch.Tensor]]  # of ids (B, L), an image a row
    auto_class: Any = AutoModelForImageTextToText


def _pixels(num_rows: int, *shape: int) -> torch.Tensor:
    return torch.randn(num_rows, *shape, generator=torch.Generator().manual_seed(5))


def _of_clip(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(len(ids), 3, 8, 8)}


def _with_types(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return _of_clip(ids) | {"token_type_ids": (ids == IMAGE).long()}


def _in_patches(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": _pixels(len(ids), 16, 96).flatten(0, 1),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(ids)),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def _crossed(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": _pixels(len(ids), 1, 1, 3, 8, 8),
        "aspect_ratio_ids": torch.ones(len(ids), 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(len(ids), 1, 1, dtype=torch.long),
        "cross_attention_mask": (ids != PAD).long()[..., None, None],
    }


_ALL = {
    "llava": Seeing(
        "llava",
        {
            "text_config": _DENSE | {"model_type": "llama"},
            "vision_config": _CLIP | {"model_type": "clip_vision_model"},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        _of_clip,
    ),
    "gemma3": Seeing(  # The tokens of an image see each other.
        "gemma3",
        {
            "text_config": ARCHITECTURES["gemma3"].config | NO_SPECIAL,
            "vision_config": _CLIP | {"model_type": "siglip_vision_model"},
            "image_token_index": IMAGE,
            "mm_tokens_per_image": _NUM_PLACES,
        },
        _with_types,
    ),
    "qwen2-vl": Seeing(  # Positions have four rows.
        "qwen2_vl",
        {
            "text_config": _DENSE | {"rope_parameters": _IN_THREE},
            "vision_config": _QWEN_EYES | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
            **_QWEN_IDS,
        },
        _in_patches,
    ),
    "qwen3-5": Seeing(  # Running states, and so chains.
        "qwen3_5",
        {
            "text_config": ARCHITECTURES["qwen3-5"].config
            | NO_SPECIAL
            | {"rope_parameters": _IN_THREE | {"partial_rotary_factor": 1.0}},
            "vision_config": _QWEN_EYES | {"num_position_embeddings": 16},
            **_QWEN_IDS,
        },
        _in_patches,
    ),
    "mllama": Seeing(  # Some layers look at the images in each step.
        "mllama",
        {
            "text_config": _DENSE
            | {"model_type": "mllama_text_model", "cross_attention_layers": [1]}
            | {"num_hidden_layers": 3, "bos_token_id": 1},
            "vision_config": _CLIP
            | {"attention_heads": 2, "num_global_layers": 1, "max_num_tiles": 1}
            | {"intermediate_layers_indices": [0], "vision_output_dim": 32}
            | {"supported_aspect_ratios": [[1, 1]]},
            "image_token_index": IMAGE,
        },
        _crossed,
    ),
    "git": Seeing(  # Images have columns in the KV, and no ids.
        "git",
        _DENSE | {"vision_config": _CLIP},
        _of_clip,
        AutoModelForCausalLM,
    ),
}
SEEING = {name: kind for name, kind in _ALL.items() if kind.model_type in CONFIG_MAPPING}


@cache
def seeing_model(name: str) -> Any:
    """A random model, made once."""
    kind = SEEING[name]
    config = {"initializer_range": 0.3, "tie_word_embeddings": False} | NO_SPECIAL | kind.config
    config = AutoConfig.for_model(kind.model_type, **config)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind.auto_class.from_config(config).eval()
        for name, weight in model.named_parameters():
            if not weight.any() and name.endswith(("gate", "projection_weight")):
                torch.nn.init.normal_(weight)  # With zeros, an image would change nothing.
    model.generation_config.pad_token_id = PAD
    return model


def prompt_with_image(name: str, num_rows: int = 1, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch with an image in each row, left-padded unevenly."""
    inputs = prompt(num_rows, 21, seed=seed)
    ids = inputs["input_ids"].clamp(max=VOCAB - 4)
    if name != "git":
        ids[:, 9], ids[:, 10 : 10 + _NUM_PLACES] = START, IMAGE
    return {**inputs, "input_ids": ids, **SEEING[name].images(ids)}
