"""What a model is given beyond ids, positions, a mask and KV.

Images and sounds are read with the prompt, and the KV holds what came of them. Some arguments go on
to each plain step, while the forward of a draft gets none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from selfspec.compat.generation import KV_NAMES
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
NO_TOKENS = "its KV has columns that are no tokens, such as images"


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


def columns_reason(kv: Cache) -> str | None:
    """Why drafts can't go on after what a KV cache holds; None if they can."""
    return NO_TOKENS if len(numbers_of_columns(kv) - {0}) > 1 else None


def numbers_of_columns(kv: Cache) -> set[int]:
    """The different numbers; a layer of running states has none, and one without keys has 0."""
    return {int(x.get_seq_length()) for x in kv.layers if hasattr(x, "get_seq_length")}


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
