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

EXACT_ATTENTION = "selfspec_float64"
# More tokens than this are a step only if they come with a mask that is added, as trees do. Others
# are a prompt. There float64 would cost as much as 8 bits save. Texts with and without drafts read
# their prompts in the same way.
_MOST_TOKENS = 64
_TASK = 32  # One thread works on this many queries of a head at a time.
# About this many keys' values are widened at once: 2 MB, which stay in the cache. Larger pieces of
# memory are given back to the system and fetched again for each layer.
_AT_ONCE = 1 << 18


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
    """What ``"sdpa"`` does, in float64 for a step.

    Heads that share keys become one head with more queries, so that no keys are copied, unless some
    threads would have no work then. Only some heads are widened at a time.
    """
    mask, (rows, num_heads, width, _) = attention_mask, query.shape
    if width > _MOST_TOKENS and (mask is None or mask.dtype is torch.bool):
        return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    states, bias = (query, key, value), options.pop("position_bias", None)
    if bias is not None or (width > 1 if mask is None else mask.shape[1] > 1):
        *wide, bias = map(_wide, (*states, mask, bias))
        outcome, _ = sdpa_attention_forward(module, *wide, position_bias=bias, **options)
        return outcome.to(query.dtype), None
    num_keys, number = key.shape[1], num_heads // key.shape[1]
    if rows * num_keys * -(-number * width // _TASK) < torch.get_num_threads():
        num_keys, number = num_heads, 1
    if mask is not None:
        mask = _wide(mask[:, :, None].expand(-1, -1, number, width, -1)).flatten(2, 3)
    outcome = query.new_empty(rows, width, num_keys, number, value.shape[-1])
    at_once = max(_AT_ONCE * key.shape[1] // key.numel(), torch.get_num_threads())
    some = at_once * num_keys // key.shape[1]  # heads of queries
    queries = _wide(query).reshape(rows, num_keys, number * width, -1)
    sizes = some, at_once, at_once
    heads = (torch.split(x, n, 1) for x, n in zip((queries, key, value), sizes, strict=True))
    given: Any = {"dropout_p": options.get("dropout", 0.0), "scale": options.get("scaling")}
    for q, k, v, into in zip(*heads, torch.split(outcome, some, 2), strict=True):
        found = scaled_dot_product_attention(q, _wide(k), _wide(v), mask, enable_gqa=True, **given)
        into.copy_(found.reshape(rows, -1, number, width, found.shape[-1]).permute(0, 3, 1, 2, 4))
    return outcome.flatten(2, 3), None


def _wide(values: torch.Tensor | None) -> Any:
    """The same in float64 without gaps, but for a mask that only says which keys are seen."""
    if values is None or values.dtype is torch.bool:
        return values
    return values.to(torch.float64, memory_format=torch.contiguous_format)


register_attention(EXACT_ATTENTION, _attend)
