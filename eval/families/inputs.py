"""Prompts with an image or a sound for small models, as the family's processor would give them.

What a model takes is read off its `forward`, and the number of places that an image takes in the
text off the features that the model makes of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from eval.families.special import MEDIA, NO_PLACES, PLACES

Inputs = dict[str, torch.Tensor]

_PIXELS = 16  # Of a side of an image.
_BEFORE = (7, 3, 11, 19, 5, 23, 42)
_AFTER = (9, 31, 17, 7, 3, 11, 19, 5, 23)
_IMAGE_IDS = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_token")
_SOUND_IDS = ("audio_token_id", "audio_token_index", "audio_token")


def text_inputs(num_rows: int = 1) -> Inputs:
    """Text alone; of two rows, the second one is shorter and padded at its left."""
    return _padded([[*_BEFORE[2 * row :], *_AFTER] for row in range(num_rows)])


def continued(inputs: Inputs, ids: torch.Tensor) -> Inputs:
    """A second turn: more text after all ids of the first one, whose media its KV cache holds."""
    ids = torch.cat([ids, torch.tensor([_AFTER])], dim=1)
    types = {name: value for name, value in inputs.items() if "type_ids" in name}
    more = {n: pad(v, (0, ids.shape[1] - v.shape[1])) for n, v in types.items()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def media_inputs(model: Any, num_rows: int = 1) -> Inputs | None:
    """Text with an image in each row, or with a sound; None for a model that takes neither.

    Raises what the model raises at an image that is not made as it wants it.
    """
    takes = inspect.signature(model.forward).parameters
    if "pixel_values" in takes or model.config.model_type in MEDIA:
        media, names = _pixels(model, takes), _IMAGE_IDS
        features = _features(model, "get_image_features", media)
    elif "input_features" in takes or "input_values" in takes:
        media, names = _sound(model, takes), _SOUND_IDS
        features = _features(model, "get_audio_features", media)
    else:
        return None
    token = _id_of(model.config, names)
    num_places = 0 if token is None else features
    rows = [[*_BEFORE[2 * row :], *[token] * num_places, *_AFTER] for row in range(num_rows)]
    inputs = _padded(rows)
    if token is not None:
        _add_types(inputs, takes, token, model)
    if "cross_attention_mask" in takes:
        seen = media["aspect_ratio_mask"][:, None]
        media["cross_attention_mask"] = seen.repeat(1, inputs["input_ids"].shape[1], 1, 1)
    return inputs | {name: torch.cat([value] * num_rows) for name, value in media.items()}


def _padded(rows: list[list[int]]) -> Inputs:
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _add_types(inputs: Inputs, takes: Mapping[str, Any], token: int, model: Any) -> None:
    """Which tokens are an image's, for families whose processors say so."""
    types = (inputs["input_ids"] == token).long()
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in takes:
            inputs[name] = types


def _pixels(model: Any, takes: Mapping[str, Any]) -> Inputs:
    """An image of noise in the form that the arguments of `forward` ask for."""
    own = MEDIA.get(model.config.model_type)
    generator = torch.Generator().manual_seed(1)
    if own is not None:
        return own(model, generator)
    vision = getattr(model.config, "vision_config", model.config)
    if "image_grid_thw" in takes:
        return patches(vision, generator)
    size = getattr(vision, "image_size", None) or _PIXELS
    side = size if isinstance(size, int) else size[0]
    image = torch.rand(1, 3, side, side, generator=generator)
    if "pixel_attention_mask" in takes:
        return {"pixel_values": image[None]}
    reader = getattr(model, "get_image_features", model.forward)
    if "image_sizes" in inspect.signature(reader).parameters:
        return {"pixel_values": image, "image_sizes": torch.tensor([[side, side]])}
    return {"pixel_values": image}


def patches(vision: Any, generator: torch.Generator) -> Inputs:
    """An image of four by four patches, as Qwen's processors cut it."""
    in_time = getattr(vision, "temporal_patch_size", 1)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    numbers = channels * in_time * vision.patch_size**2
    grid = torch.tensor([[1, 4, 4]])
    return {"pixel_values": torch.rand(16, numbers, generator=generator), "image_grid_thw": grid}


def _sound(model: Any, takes: Mapping[str, Any]) -> Inputs:
    """A spectrum of noise, or a wave where the model takes waves."""
    own = MEDIA.get(model.config.model_type)
    generator = torch.Generator().manual_seed(1)
    if own is not None:
        return own(model, generator)
    audio = getattr(model.config, "audio_config", model.config)
    length = 2 * getattr(audio, "max_source_positions", 32)
    bins = getattr(audio, "num_mel_bins", 16)
    sound = {"input_features": torch.rand(1, bins, length, generator=generator)}
    for name in ("feature_attention_mask", "input_features_mask"):
        if name in takes:
            sound[name] = torch.ones(1, length, dtype=torch.long)
    return sound


@torch.inference_mode()
def _features(model: Any, name: str, media: Inputs) -> int:
    """How many places of a text the features of one image or sound take."""
    model_type = model.config.model_type
    if model_type in PLACES:
        return PLACES[model_type]
    if model_type in NO_PLACES:
        return 0
    features = getattr(model, name)(**media)
    return _num_rows(getattr(features, "pooler_output", features))


def _num_rows(features: Any) -> int:
    if isinstance(features, torch.Tensor):
        return features.shape[:-1].numel()
    return sum(map(_num_rows, features))


def _id_of(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((each for each in found if isinstance(each, int)), None)
