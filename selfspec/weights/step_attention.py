"""Attention whose outcome does not depend on how many tokens a step has.

Torch adds up keys and values in an order that depends on how many there are and where they stand.
In float32 that changes the last bit of an outcome. Where inputs are rounded to 8 bits, that bit can
change a whole step of rounding, and each layer makes more of it. In float64 the order changes only
bits that are lost when the outcome is rounded to float32.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.attention import joined_attention, joined_mask, num_joined, wide
from selfspec.compat.generation import (
    attention_implementation,
    keeps_a_state,
    register_attention,
    sdpa_attention_forward,
)

EXACT_ATTENTION = "selfspec_float64"
# More tokens than this are a step only if they come with a mask that is added, as trees do. Others
# are a prompt. There float64 would cost as much as 8 bits save. Texts with and without drafts read
# their prompts in the same way.
_MOST_TOKENS = 64


def attend_exactly(model: PreTrainedModel) -> None:
    """Gives a model this attention in place of ``"sdpa"``, where that is all that mixes tokens.

    A model that keeps a state mixes them elsewhere too.
    """
    if attention_implementation(model.config) == "sdpa" and not keeps_a_state(model):
        model.set_attn_implementation(EXACT_ATTENTION)


def attends_exactly(model: PreTrainedModel) -> bool:
    return attention_implementation(model.config) == EXACT_ATTENTION


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """What ``"sdpa"`` does, in float64 for a step.

    Heads that share keys become one head with more queries, so that no keys are copied.
    """
    mask, width = attention_mask, query.shape[2]
    if width > _MOST_TOKENS and (mask is None or mask.dtype is torch.bool):
        return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    bias = options.pop("position_bias", None)
    mask = None if mask is None else wide(mask)
    bias = None if bias is None else wide(bias)
    if bias is not None or (width > 1 if mask is None else mask.shape[1] > 1):
        states = (wide(query), wide(key), wide(value))
        outcome, _ = sdpa_attention_forward(module, *states, mask, position_bias=bias, **options)
        return outcome.to(query.dtype), None
    number = num_joined(query, query.shape[1] // key.shape[1])
    if mask is not None:
        mask = joined_mask(mask, number, width)
    outcome = joined_attention(
        (query, key, value),
        mask,
        number,
        in_double=True,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return outcome, None


register_attention(EXACT_ATTENTION, _attend)
