"""Attention in which query heads that share keys are one head with more queries.

In most models several query heads share one head of keys and values. If there is a mask,
transformers' sdpa attention copies the keys and values of the whole text for each of these query
heads, in every layer and step. Here nothing is copied, and a query sees the same keys as before.

`grouped_attention` lets forwards over drafts attend so. A plain step has no mask, and transformers'
attention computes it. The exception is half precision on a CPU, where torch is slow with a single
query: there queries are joined too, and a single one is doubled.

`EXACT_ATTENTION` names attention in float64, whose output does not depend on how many tokens a
step has. Torch adds up keys and values in an order that depends on how many there are and
where they stand. In float32 that changes the last bit of an output. Where inputs are rounded to 8
bits, that bit can change a whole step of rounding, and layers make more of it. In float64 the order
changes only bits that are lost when the output is rounded to float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from selfspec.compat.generation import (
    ATTENTION_FUNCTIONS,
    register_attention,
    sdpa_attention_forward,
)
from selfspec.compat.swapped import swapped

EXACT_ATTENTION = "selfspec_float64"
# Queries (B, heads, Q, D), keys (B, heads of keys, columns, D) and values.
States = tuple[torch.Tensor, ...]
_HALVES = (torch.bfloat16, torch.float16)
_TASK = 32  # On a CPU, one thread works on this many queries of a head at a time.
# About this many keys' values are widened at once: 2 MB, which stay in the cache. Larger pieces of
# memory are given back to the system and fetched again for every layer.
_AT_ONCE = 1 << 18
_NAME = "sdpa"
# More tokens than this are a step only if they come with a mask that is added, as trees do. Others
# are a prompt. There float64 would cost as much as 8 bits save. Texts with and without drafts read
# their prompts in the same way.
_MOST_TOKENS = 64
# Arguments that only transformers' own code understands.
_ONLY_THEIRS = ("position_bias", "cache", "softcap")


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Inside, in this thread, sdpa attention joins heads that share keys. Use it for one forward.

    Nothing is changed if other code has replaced transformers' attention, or while torch compiles.
    Transformers' attention is back in its place when no thread is inside any more.
    """
    if torch.compiler.is_compiling():
        yield
        return
    outside = _this_thread.masks
    with swapped(ATTENTION_FUNCTIONS, _NAME, _ours):
        _this_thread.masks = _Masks()
        try:
            yield
        finally:
            _this_thread.masks = outside


def _ours(present: Any) -> Any:
    """Ours in place of transformers' attention; what other code has registered is left alone."""
    return _attend if present is sdpa_attention_forward else present


class _Masks:
    """The masks for joined heads, which all layers of a forward share."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def joined(self, mask: torch.Tensor, number: int, width: int) -> torch.Tensor:
        """The output of `_joined_mask`, made once."""
        place = id(mask), number
        if place not in self._known:  # Holding the mask keeps its id from being used again.
            self._known[place] = mask, _joined_mask(mask, number, width)
        return self._known[place][1]


class _ThisThread(threading.local):
    masks: _Masks | None = None  # Of this thread's forward.


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """Replaces transformers' sdpa attention; does the same outside of `grouped_attention`.

    What torch compiles attends as transformers does.
    """
    masks = None if torch.compiler.is_compiling() else _this_thread.masks
    mask, number = attention_mask, 0
    if masks and not any(others.get(name) is not None for name in _ONLY_THEIRS):
        number = _num_heads_to_join(module, query, key, mask)
    if masks is None or not number:
        options = {"dropout": dropout, "scaling": scaling, **others}
        return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    if mask is not None:
        mask = masks.joined(mask, number, query.shape[2])
    states = query, key, value
    return _joined_attention(states, mask, number, dropout_p=dropout, scale=scaling), None


def _num_heads_to_join(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,  # (B, 1, Q, columns), or of a shape that only sdpa can handle
) -> int:
    """How many heads to join into one; 0 if transformers must compute this, or is as fast."""
    rows, num_heads, width, _ = query.shape
    num_sharing: int = getattr(module, "num_key_value_groups", 1)
    if num_heads != key.shape[1] * num_sharing:
        return 0
    if mask is not None and mask.shape[:3] != (rows, 1, width):
        return 0
    if mask is None or num_sharing == 1:
        is_slow = query.device.type == "cpu" and width == 1 and query.dtype in _HALVES
        return num_sharing if is_slow else 0
    number = num_sharing if width == 1 else _num_joined(query, num_sharing)
    return 0 if number == 1 else number


def _attend_in_double(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """What ``"sdpa"`` does, in float64 for a step."""
    mask, width = attention_mask, query.shape[2]
    if width > _MOST_TOKENS and (mask is None or mask.dtype is torch.bool):
        return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    bias = options.pop("position_bias", None)
    mask = None if mask is None else _wide(mask)
    bias = None if bias is None else _wide(bias)
    if bias is not None or (width > 1 if mask is None else mask.shape[1] > 1):
        states = (_wide(query), _wide(key), _wide(value))
        output, _ = sdpa_attention_forward(module, *states, mask, position_bias=bias, **options)
        return output.to(query.dtype), None
    number = _num_joined(query, query.shape[1] // key.shape[1])
    if mask is not None:
        mask = _joined_mask(mask, number, width)
    output = _joined_attention(
        (query, key, value),
        mask,
        number,
        in_double=True,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return output, None


def _num_joined(query: torch.Tensor, num_sharing: int) -> int:
    """How many heads of queries (B, heads, Q, D) become one: at most all that share keys.

    On a CPU, fewer are joined if some threads would have no work; keys are then copied once for
    each group of joined heads.
    """
    rows, num_heads, width, _ = query.shape
    threads = torch.get_num_threads() if query.device.type == "cpu" else 1
    for number in range(num_sharing, 1, -1):
        num_tasks = rows * (num_heads // number) * -(-number * width // _TASK)
        if num_sharing % number == 0 and num_tasks >= threads:
            return number
    return 1


def _joined_mask(mask: torch.Tensor, number: int, width: int) -> torch.Tensor:
    """The mask (B, 1, number * Q, columns) for joined heads; `mask` may have one row for all."""
    if number == 1 or mask.shape[2] == 1 == width:
        return mask
    return mask[:, :, None].expand(-1, -1, number, width, -1).flatten(2, 3)


def _joined_attention(
    states: States,
    mask: torch.Tensor | None,
    number: int,
    *,
    in_double: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The output (B, Q, heads, D), with this many heads of queries as one, and their mask.

    In float64, only some heads are widened at a time.
    """
    query, *keys = states
    rows, num_heads, width, dim = query.shape
    queries = query.reshape(rows, num_heads // number, number * width, dim)
    if in_double:
        num_keys = keys[0].shape[1]
        at_once = max(_AT_ONCE * num_keys // max(keys[0].numel(), 1), torch.get_num_threads())
        sizes = at_once * queries.shape[1] // num_keys, at_once, at_once
        heads = map(partial(torch.split, dim=1), (queries, *keys), sizes)
        parts = [
            _attend_joined(tuple(map(_wide, part)), mask, options)
            for part in zip(*heads, strict=True)
        ]
        output = torch.cat(parts, 1).to(query.dtype)
    else:
        output = _attend_joined((queries, *keys), mask, options)
    return output.reshape(rows, num_heads, width, -1).transpose(1, 2).contiguous()


def _attend_joined(
    states: States, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Each head of keys serves as many heads of queries as come after one another."""
    queries, key, value = states
    num_queries, num_copies = queries.shape[2], queries.shape[1] // key.shape[1]
    if num_copies > 1:
        key, value = (states.repeat_interleave(num_copies, dim=1) for states in (key, value))
    # Torch is slow with a single query in half precision on a CPU.
    if num_queries == 1 and queries.device.type == "cpu" and queries.dtype in _HALVES:
        queries = torch.cat([queries, queries], dim=2)
    output = scaled_dot_product_attention(queries, key, value, attn_mask=mask, **options)
    return output[:, :, :num_queries]


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The same in float64 without gaps, but for a mask that only says which keys are seen."""
    if values.dtype is torch.bool:
        return values
    return values.to(torch.float64, memory_format=torch.contiguous_format)


register_attention(EXACT_ATTENTION, _attend_in_double)
_this_thread = _ThisThread()
