"""Prompts with an image or a sound for small models, as the family's processor would give them.

What a model takes is read off its `forward` and the method that makes features of an image. Some
forms of an image are tried until the model takes one, and its features say how many places the
image has in the text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch.nn.functional import pad

from tools.census_families.special import MEDIA, NO_PLACES, PLACES

Inputs = dict[str, torch.Tensor]

_SIDE = 4  # An image has so many patches in each direction.
_BEFORE = (7, 3, 11, 19, 5, 23, 42)
_AFTER = (9, 31, 17, 7, 3, 11, 19, 5, 23)
_IDS = {
    "image": (
        "image_token_id",
        "image_token_index",
        "media_placeholder_token_id",
        "image_token",
        "image_patch_id",
    ),
    "sound": ("audio_token_id", "audio_token_index", "audio_token"),
}
_NAMES = {"image": ("pixel_values",), "sound": ("input_features", "input_values")}


def text_inputs(num_rows: int = 1) -> Inputs:
    """Text alone; of two rows, the second one is shorter and padded at its left."""
    return _padded([[*_BEFORE[2 * row :], *_AFTER] for row in range(num_rows)])


def continued(inputs: Inputs, ids: torch.Tensor) -> Inputs:
    """A second turn: more text after all ids of the first one, whose media its KV cache holds."""
    ids = torch.cat([ids, torch.tensor([_AFTER])], dim=1)
    types = {name: value for name, value in inputs.items() if "type_ids" in name}
    more = {n: pad(v, (0, ids.shape[1] - v.shape[1])) for n, v in types.items()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def media_of(model: Any) -> list[str]:
    """Which of "image" and "sound" the model reads in its prompts."""
    takes = _parameters(model.forward)
    parts = {"image": "vision_config", "sound": "audio_config"}
    has = [kind for kind, part in parts.items() if getattr(model.config, part, True) is not None]
    return [kind for kind in has if any(name in takes for name in _NAMES[kind])]


def media_inputs(model: Any, num_rows: int = 1, *, kind: str = "image") -> Inputs:
    """Text with an image or a sound in each row.

    Raises what the model raises at one that is not made as it wants it.
    """
    takes = _parameters(model.forward)
    media, num_places = medium(model, kind)
    token = _id_of(model.config, _IDS[kind])
    places = [] if token is None else [token] * num_places
    rows = [[*_BEFORE[2 * row :], *places, *_AFTER] for row in range(num_rows)]
    inputs = _padded(rows)
    if model.config.is_encoder_decoder and model.main_input_name != "input_ids":
        inputs = {"decoder_input_ids": torch.tensor([rows[0]] * num_rows)}
    for name in ("mm_token_type_ids", "token_type_ids", "image_mask"):
        if name in takes and token is not None:
            inputs[name] = (inputs["input_ids"] == token).long()
    if "cross_attention_mask" in takes:
        seen = media["aspect_ratio_mask"][:, None]
        inputs["cross_attention_mask"] = seen.repeat(num_rows, inputs["input_ids"].shape[1], 1, 1)
    return inputs | {name: torch.cat([value] * num_rows) for name, value in media.items()}


def _padded(rows: list[list[int]]) -> Inputs:
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@cache
def medium(model: Any, kind: str) -> tuple[Inputs, int]:
    """The first form of an image or a sound that the model takes, and its number of places."""
    model_type = model.config.model_type
    name = {"image": "get_image_features", "sound": "get_audio_features"}[kind]
    makers = (getattr(each, name, None) for each in (getattr(model, "model", model), model))
    features: Callable[..., Any] | None = next(filter(None, makers), None)
    places = PLACES.get(model_type)
    if features is None and model.config.is_encoder_decoder:  # No place of a text is an image's.
        features, places = model.get_encoder().forward, 0
    if model_type in MEDIA:
        forms = iter([MEDIA[model_type](model)])
    else:
        forms = _images(model, features) if kind == "image" else _sounds(model, features)
    if features is None or model_type in NO_PLACES:
        return next(forms), places or 0
    wrong: Exception | None = None
    for media in forms:
        try:
            with torch.inference_mode():
                made = features(**media)
            if places is not None:
                return media, places
            found = getattr(made, "pooler_output", made)
            return media, _num_rows(made.last_hidden_state if found is None else found)
        except Exception as error:
            wrong = wrong or error
    assert wrong is not None
    raise wrong


def _images(model: Any, features: Any) -> Iterator[Inputs]:
    """An image of noise, cut into patches or whole, with what else the model asks for."""
    vision = getattr(model.config, "vision_config", model.config)
    patch: Any = getattr(vision, "patch_size", 4)
    patch = patch if isinstance(patch, int) else patch[0]
    size: Any = getattr(vision, "image_size", None) or _SIDE * patch
    size = size if isinstance(size, int) else size[0]
    channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    takes = _parameters(features or model.forward)
    merge = getattr(vision, "spatial_merge_size", 1)
    grid = [_SIDE, _SIDE]
    others = {
        "image_grid_thw": [[1, *grid]],
        "image_grid_hw": [grid],
        "image_merge_sizes": [merge],
        "spatial_shapes": [grid],
        "target_sizes": [grid],
        "image_sizes": [[size, size]],
        "image_position_ids": [[[i % _SIDE, i // _SIDE] for i in range(_SIDE**2)]],
    }
    given = {name: torch.tensor(value) for name, value in others.items() if name in takes}
    if not _is_needed(features, "image_sizes"):
        given.pop("image_sizes", None)
    number = _SIDE * _SIDE
    cut: list[tuple[Any, Any]] = [
        ((number, 2 * channels * patch**2), None),  # two pictures of a film
        ((number, channels * patch**2), None),
        ((number, channels, patch, patch), None),
        ((1, number, channels * patch**2), (1, number)),
        ((1, channels, patch, number * patch), None),
    ]
    if "image_position_ids" in given:
        cut.insert(0, ((1, number, channels * patch**2), None))
    whole: list[tuple[Any, Any]] = [
        ((1, channels, size, size), (1, 1, size, size)),
        ((1, 1, channels, size, size), (1, 1)),
        ((1, 3, channels, size, size), None),
    ]
    is_cut = given.keys() - {"image_merge_sizes", "image_sizes"}
    needs_mask = _is_needed(features, "pixel_attention_mask")
    for shape, mask in cut + whole if is_cut else whole + cut:
        masks = {"pixel_attention_mask": torch.ones(mask).bool()} if needs_mask and mask else {}
        yield {"pixel_values": _noise(*shape), **given, **masks}


def _sounds(model: Any, features: Any) -> Iterator[Inputs]:
    """A spectrum of noise, or a wave where the model takes waves."""
    takes = _parameters(model.forward)
    audio = getattr(model.config, "audio_config", model.config)
    bins = getattr(audio, "num_mel_bins", getattr(audio, "input_feat_per_channel", 16))
    lengths = (2 * getattr(audio, "max_source_positions", 32), 64, 32)
    shapes: list[tuple[int, ...]] = [
        shape for n in lengths for shape in ((1, bins, n), (1, n, bins))
    ]
    if "input_features" not in takes:
        shapes = [(1, 9600), (1, 1, 9600)]
    for shape in shapes:
        mask = torch.ones(1, max(shape), dtype=torch.long)
        sound = {next(name for name in _NAMES["sound"] if name in takes): _noise(*shape)}
        for name in ("feature_attention_mask", "input_features_mask", "padding_mask"):
            if name in takes:
                sound[name] = mask
        yield sound


def _noise(*shape: int) -> torch.Tensor:
    return torch.rand(prod(shape), generator=torch.Generator().manual_seed(1)).view(shape)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _is_needed(function: Any, name: str) -> bool:
    found = None if function is None else _parameters(function).get(name)
    return found is not None and found.default is inspect.Parameter.empty


def _num_rows(features: Any) -> int:
    if isinstance(features, torch.Tensor):
        return features.shape[:-1].numel()
    return sum(map(_num_rows, features))


def _id_of(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((each for each in found if isinstance(each, int)), None)
