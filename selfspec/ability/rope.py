"""Rotary embeddings whose frequencies depend on the largest position of a forward.

"dynamic" and "longrope" embeddings change at a certain length. If a tree reaches beyond it, all
tokens of the tree get the frequencies of a longer text, while transformers would still use those of
a shorter one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig


def changing_rope(config: PreTrainedConfig) -> str | None:
    """The type of the model's rotary embedding if it changes with the length; else None."""
    return next((rope_type for rope_type, _ in _limits(config)), None)


def changes_other_rows(config: PreTrainedConfig, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether the longest row is so long that it changes the frequencies of the other rows."""
    return any(_num_positions(model_kwargs) > limit for _, limit in _limits(config))


def rope_limit(
    config: PreTrainedConfig, max_new_columns: int, model_kwargs: Mapping[str, Any]
) -> tuple[str, int] | None:
    """The type of an embedding that changes that soon after the prompt, and at which length."""
    for rope_type, limit in _limits(config):
        first = _num_positions(model_kwargs)
        if first + max_new_columns >= limit and (rope_type != "longrope" or first <= limit):
            return rope_type, limit
    return None


def _limits(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """The types of the embeddings that change, and the length beyond which they do."""
    config = config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        rope_type = str(rope.get("rope_type", ""))
        if "dynamic" in rope_type:
            yield "dynamic", config.max_position_embeddings
        elif rope_type == "longrope":
            original = rope.get("original_max_position_embeddings")
            yield "longrope", original or config.original_max_position_embeddings


def _num_positions(model_kwargs: Mapping[str, Any]) -> int:
    """How many positions the longest row of a prompt has."""
    position_ids = model_kwargs.get("position_ids")
    return 0 if position_ids is None else int(position_ids.max()) + 1
