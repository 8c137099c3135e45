"""Attention whose outcome does not depend on how many tokens a step has.

Torch adds up keys and values in an order that depends on how many there are and where they stand.
In float32 that changes the last bit of an outcome. Where inputs are rounded to 8 bits, that bit can
change a whole step of rounding, and each layer makes more of it. In float64 the order changes only
bits that are lost when the outcome is rounded to float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from selfspec.compat.generation import (
    attention_implementation,
    keeps_a_state,
    register_attention,
    sdpa_attention_forward,
)

__all__ = ["EXACT_ATTENTION", "attend_exactly"]

EXACT_ATTENTION = "selfspec_float64"
# A forward over more tokens reads a prompt. There float64 would cost as much as 8 bits save. Texts
# with and without drafts read their prompts in the same way.
_MOST_TOKENS = 64


def attend_exactly(model: Any) -> bool:
    """Gives a model this attention in place of ``"sdpa"``; False if it can't be had.

    A model that keeps a state, or has other attention, mixes tokens elsewhere too.
    """
    if attention_implementation(model.config) != "sdpa" or keeps_a_state(model):
        return False
    register_attention(EXACT_ATTENTION, _attend)
    model.set_attn_implementation(EXACT_ATTENTION)
    return attention_implementation(model.config) == EXACT_ATTENTION


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """What ``"sdpa"`` does, in float64 for a step."""
    if query.shape[2] > _MOST_TOKENS:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    states = query.double(), key.double(), value.double()
    mask, bias = _widened(attention_mask), _widened(options.pop("position_bias", None))
    if mask is None or bias is not None:
        outcome, _ = sdpa_attention_forward(module, *states, mask, position_bias=bias, **options)
    else:  # Stock would copy keys and values for each query head.
        given = {"dropout_p": options.get("dropout", 0.0), "scale": options.get("scaling")}
        outcome = scaled_dot_product_attention(*states, mask, enable_gqa=True, **given)
        outcome = outcome.transpose(1, 2)
    return outcome.to(query.dtype).contiguous(), None


def _widened(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask for queries in float64."""
    return mask.double() if mask is not None and mask.is_floating_point() else mask
