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
# More tokens than this are a step only if they come with a mask that is added, as trees do. Others
# are a prompt. There float64 would cost as much as 8 bits save. Texts with and without drafts read
# their prompts in the same way.
_MOST_TOKENS = 64
_TASK = 32  # One thread works on this many queries of a head at a time.


def attend_exactly(model: Any) -> bool:
    """Gives a model this attention in place of ``"sdpa"``; False if it can't be had.

    A model that keeps a state, or has other attention, mixes tokens elsewhere too.
    """
    if attention_implementation(model.config) != "sdpa" or keeps_a_state(model):
        return False
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
    mask, (rows, num_heads, width, _) = attention_mask, query.shape
    if width > _MOST_TOKENS and (mask is None or not mask.is_floating_point()):
        return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    dtype, states = query.dtype, (query.double(), key.double(), value.double())
    mask, bias = _widened(mask), _widened(options.pop("position_bias", None))
    is_plain = width == 1 if mask is None else mask.shape[1] == 1
    if bias is not None or not is_plain:
        outcome, _ = sdpa_attention_forward(module, *states, mask, position_bias=bias, **options)
    else:
        given = {"dropout_p": options.get("dropout", 0.0), "scale": options.get("scaling")}
        outcome = _joined(*states, mask, **given).reshape(rows, num_heads, width, -1)
        outcome = outcome.transpose(1, 2)
    return outcome.to(dtype).contiguous(), None


def _joined(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Heads that share keys become one head with more queries, so that no keys are copied.

    Unless some threads would have no work then.
    """
    rows, num_heads, width, dim = query.shape
    num_keys, number = key.shape[1], num_heads // key.shape[1]
    if rows * num_keys * -(-number * width // _TASK) < torch.get_num_threads():
        num_keys, number = num_heads, 1
    queries = query.reshape(rows, num_keys, number * width, dim)
    if mask is not None and number > 1:
        mask = mask.repeat(1, 1, number, 1)
    return scaled_dot_product_attention(queries, key, value, mask, enable_gqa=True, **options)


def _widened(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask for queries in float64."""
    return mask.double() if mask is not None and mask.is_floating_point() else mask


register_attention(EXACT_ATTENTION, _attend)
