"""Rules for families of models that no trial finds out, by a field of their config.

A new version of transformers may bring a family that needs a row. Two rules have no field of a
config: `unplaced_id`, and the positions that Qwen4-Exp keeps in its KV cache (`compat/states`).

The frequencies of "dynamic" and "longrope" rotary embeddings depend on the largest position of a
forward, and change at a certain length. If a tree reaches beyond it, all its tokens get those of a
longer text, while transformers would still use those of a shorter one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.forward.model import takes

PLAIN, NO_TREES = "plain", "no trees"


class Family(NamedTuple):
    """A consequence of a config that sets `field`."""

    field: str
    consequence: str
    why: str


_WINDOW = "its config sets {!r}, a window that the model makes itself"
FAMILIES = (
    Family("window_size", NO_TREES, _WINDOW),  # GPT-Neo and others
    Family("attention_window", NO_TREES, _WINDOW),
    Family("local_attention_window", NO_TREES, _WINDOW),
    Family("attention_types", NO_TREES, _WINDOW),
    # NLLB-MoE and Switch Transformers
    Family("expert_capacity", PLAIN, "its experts take a limited number of a forward's tokens"),
    # Doge. Which of two equal columns it keeps depends on the shape of the forward.
    Family("keep_window_size", PLAIN, "its attention keeps the strongest columns of a text"),
)


def family_reason(config: PreTrainedConfig, consequence: str) -> str | None:
    """Why a model is of a family with this consequence; None if it is not."""
    config = config.get_text_config(decoder=True)
    for family in FAMILIES:
        if family.consequence == consequence and getattr(config, family.field, None):
            return family.why.format(family.field)
    return None


def unplaced_id(model: PreTrainedModel) -> int | None:
    """A token that can't be a draft, nor come before one; None if all can.

    Without `position_ids`, M2M-100 counts the tokens that are no pads.
    """
    config = model.config.get_text_config(decoder=True)
    return None if takes(model, "position_ids") else getattr(config, "pad_token_id", None)


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
