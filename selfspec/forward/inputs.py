"""What a model is given beyond ids, positions, a mask and KV.

Images and sounds are read with the prompt, and the KV holds what came of them. Some arguments go on
to each plain step, while the forward of a draft gets none of them. So a model that gets others than
those that are known to change nothing there is decoded plainly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from selfspec.compat.generation import KV_NAMES, kv_of, update_arguments
from selfspec.compat.states import keeps_nothing, states_by_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Arguments of a plain step that a forward over drafts has too, or has something else for.
_FOLLOWED = frozenset(
    (
        "attention_mask",
        "input_ids",
        "inputs_embeds",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        *KV_NAMES,
        "return_dict",
        "use_cache",
    )
)
# The kinds of KV layers to which a tree can be appended.
_BRANCHING = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
# They change nothing in a plain step of any family, which gets no image and no sound: which tokens
# of the prompt stand for an image, and the sizes and places of what is read with the prompt.
_OF_THE_PROMPT = frozenset(
    (
        "feature_attention_mask",
        "image_grid_hw",
        "image_grid_thw",
        "image_merge_sizes",
        "image_position_ids",
        "mm_token_type_ids",
        "second_per_grid_ts",
        "spatial_shapes",
        "video_grid_thw",
        "video_merge_sizes",
        "video_position_ids",
    )
)
_NO_TOKENS = "its KV has columns that are no tokens, such as images"
_MEDIA = ("audio", "image", "media", "video", "vision")


def plain_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any], num_tokens: int = 1
) -> dict[str, Any]:
    """What the model's own `generate()` code gives a forward over the last tokens of the ids."""
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=num_tokens, **arguments
    )
    return inputs


def other_inputs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are given and that no draft can follow."""
    others = ((name, value) for name, value in arguments.items() if name not in _FOLLOWED)
    return {name: value for name, value in others if value is not None and value != {}}


def only_followed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in _FOLLOWED}


def missing_inputs_reason(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]
) -> str | None:
    """Why drafts can't do without these arguments of a prompt; None if they can. Runs no forward.

    Types of tokens are embedded in each step of GPT-2, while in those of PaliGemma they only say
    which tokens of the prompt stand for an image.
    """
    if model.config.is_encoder_decoder:  # Chains get what plain steps get.
        return None
    if reason := columns_reason(kv_of(arguments)):
        return reason
    if not (given := other_inputs(arguments)):
        return None
    updated = update_arguments(model, dict(arguments))
    step = plain_inputs(model, pad(input_ids, (0, 1)), updated)
    reads_images = getattr(model.config, "vision_config", None) is not None
    harmless = _OF_THE_PROMPT | ({"token_type_ids"} if reads_images else set())
    if needed := sorted(other_inputs(step).keys() - harmless):
        return f"its plain steps get {', '.join(map(repr, needed))}, and drafts do not"
    if given.keys() - harmless and not _names_media(model):
        return _NO_TOKENS
    return None


def _names_media(model: PreTrainedModel) -> bool:
    """Does a config name a token that stands for an image or a sound, each in its own column?"""
    parts = (x for x in vars(model.config).values() if isinstance(x, PreTrainedConfig))
    names = (name for config in (model.config, *parts) for name in vars(config))
    return any("token" in name and any(kind in name for kind in _MEDIA) for name in names)


def columns_reason(kv: Cache) -> str | None:
    """Why drafts can't go on after what a KV cache holds; None if they can.

    A layer of running states has no number of columns, and one without keys has 0.
    """
    numbers = {int(x.get_seq_length()) for x in kv.layers if hasattr(x, "get_seq_length")}
    return _NO_TOKENS if len(numbers - {0}) > 1 else None


def foreign_layer(cache: Cache) -> str | None:
    """Names a layer to which no tree can be appended; None if there is none."""
    for layer in cache.layers:
        if type(layer) not in _BRANCHING and not keeps_nothing(layer):
            return f"a KV layer is a {type(layer).__name__}, which can't branch"
    return columns_reason(cache)


def can_hold_trees(cache: Cache, attention_types: Sequence[str | None]) -> str | None:
    """Why drafting can't take over a cache that some layers have filled; None if it can.

    Layers without attention have no type.
    """
    number, needed = len(cache.layers), len(attention_types)
    if number != needed:
        return f"it keeps {number} KV layers for {needed}, as where some run again"
    for layer, name in zip(cache.layers, attention_types, strict=True):
        is_empty = keeps_nothing(layer) or not getattr(layer, "is_initialized", True)
        if is_empty and name is not None:
            return "a KV layer holds nothing, as where layers share their keys"
    if not any(attention_types) and not states_by_place(cache.layers):
        return "its forward puts no running states into the cache that it is given"
    return foreign_layer(cache)
