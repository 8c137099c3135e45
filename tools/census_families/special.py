"""What single families need for a small model and its inputs; None leaves a config's name out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SPECIAL: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def _tiles(model: Any) -> dict[str, torch.Tensor]:
    """One image of one tile, which all tokens of the text see."""
    tiles = model.config.vision_config.max_num_tiles
    size = model.config.vision_config.image_size
    seen = torch.zeros(1, 1, tiles, dtype=torch.long)
    seen[..., 0] = 1
    return {
        "pixel_values": torch.rand(1, 1, tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": seen,
    }


def _pooled(model: Any) -> dict[str, torch.Tensor]:
    """Four by four patches, of which each place of the text gets two by two."""
    corners = torch.tensor([0, 2, 8, 10])
    return {
        "pixel_values": torch.rand(1, 16, 3 * model.config.vision_config.patch_size**2),
        "image_token_pooling": corners[:, None] + torch.tensor([0, 1, 4, 5]),
        "image_grids": torch.tensor([[2, 2, 0, 0]]),
    }


MEDIA: dict[str, Callable[..., dict[str, torch.Tensor]]] = {"mllama": _tiles, "molmo2": _pooled}
PLACES: dict[str, int] = {"granite4_vision": 10, "qwen2_audio": 16}
NO_PLACES: frozenset[str] = frozenset(("git", "mllama"))
