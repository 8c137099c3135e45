"""Rules for families of models that no trial finds out, by a field of their config.

A new version of transformers may bring a family that needs a row. Two rules have no field of a
config: `unplaced_id`, and the positions that Qwen4-Exp keeps in its KV cache (`compat/states`).
"""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.forward.model import takes

PLAIN, NO_TREES, LONGEST, PERIOD = "plain", "no trees", "longest text", "period"


class Family(NamedTuple):
    """A consequence of a config that sets `field`; the field `value` says how much."""

    field: str
    consequence: str
    why: str
    value: str = ""


_WINDOW = "its config sets {!r}, a window that the model makes itself"
FAMILIES = (
    Family("window_size", NO_TREES, _WINDOW),  # GPT-Neo and others
    Family("attention_window", NO_TREES, _WINDOW),
    Family("local_attention_window", NO_TREES, _WINDOW),
    Family("attention_types", NO_TREES, _WINDOW),
    # NLLB-MoE and Switch Transformers
    Family("expert_capacity", PLAIN, "its experts take a limited number of a forward's tokens"),
    # Doge. Which of two equal columns it keeps depends on the shape of the forward.
    Family("keep_window_size", LONGEST, "its attention keeps the strongest columns of a text"),
    # Llama 4. No tree may cross a multiple of the number.
    Family("attn_temperature_tuning", PERIOD, "it scales queries by KV column", "floor_scale"),
)


def family_reason(config: PreTrainedConfig, consequence: str) -> str | None:
    """Why a model is of a family with this consequence; None if it is not."""
    families = _families(config, consequence)
    return families[0].why.format(families[0].field) if families else None


def family_number(config: PreTrainedConfig, consequence: str) -> int:
    """The longest text, or the period; 0 if there is none."""
    config, families = config.get_text_config(decoder=True), _families(config, consequence)
    return int(getattr(config, families[0].value or families[0].field)) if families else 0


def _families(config: PreTrainedConfig, consequence: str) -> list[Family]:
    config = config.get_text_config(decoder=True)
    rows = [family for family in FAMILIES if family.consequence == consequence]
    return [family for family in rows if getattr(config, family.field, None)]


def unplaced_id(model: PreTrainedModel) -> int | None:
    """A token that can't be a draft, nor come before one; None if all can.

    Without `position_ids`, M2M-100 counts the tokens that are no pads.
    """
    config = model.config.get_text_config(decoder=True)
    return None if takes(model, "position_ids") else getattr(config, "pad_token_id", None)
