"""What single families need for a small model and its inputs; None leaves a config's name out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_IN_THREE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN_VL = {"text_config": {"rope_parameters": _IN_THREE}}

SPECIAL: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "mamba2": {"head_dim": 32},
    "mllama": {"vision_config": {"vision_output_dim": 128}},
    "qwen2_vl": _QWEN_VL | {"vision_config": {"hidden_size": 64, "embed_dim": 64}},
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
    "voxtral": {"audio_token_id": 150, "audio_config": {"intermediate_size": 256}},
}


def _tiles(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One image of one tile, which all tokens of the text see."""
    tiles = model.config.vision_config.max_num_tiles
    size = model.config.vision_config.image_size
    seen = torch.zeros(1, 1, tiles, dtype=torch.long)
    seen[..., 0] = 1
    return {
        "pixel_values": torch.rand(1, 1, tiles, 3, size, size, generator=generator),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": seen,
    }


MEDIA: dict[str, Callable[..., dict[str, torch.Tensor]]] = {"mllama": _tiles}
PLACES: dict[str, int] = {"qwen2_audio": 16}
NO_PLACES: frozenset[str] = frozenset(("git", "mllama"))
