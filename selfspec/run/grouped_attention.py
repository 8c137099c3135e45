"""Attention for forwards over drafts, without copies of keys and values that heads share.

In most models several query heads share one head of keys and values. If there is a mask, stock's
sdpa attention copies the keys and values of the whole text for each of these heads, in each layer
and each step. Here the queries of heads that share keys are joined into one head with more
queries, and nothing is copied. Each query sees the same keys as before.

A plain step has no mask, and stock's attention computes it. The exception is half precision on a
CPU, where torch is slow with a single query: there queries are joined too, and a single one is
doubled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["grouped_attention"]

_NAME = "sdpa"
_HALVES = (torch.bfloat16, torch.float16)
_TASK = 32  # On a CPU, one thread works on so many queries of a head at a time.
# Arguments that only stock's own code understands.
_STOCK_ONLY = ("position_bias", "cache", "softcap")


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Inside, in this thread, sdpa attention joins heads that share keys. Use it for one forward.

    It does nothing if other code has replaced stock's attention, or while torch compiles.
    """
    if torch.compiler.is_compiling() or not _enter():
        yield
        return
    outside, _this_thread.forward = _this_thread.forward, _Forward()
    try:
        yield
    finally:
        _this_thread.forward = outside
        _leave()


class _Forward:
    """The masks for joined heads, which all layers of one forward share."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def mask_for(self, num_heads: int, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask (B, 1, heads * Q, columns) for joined heads, made once per forward."""
        if mask is None or mask.shape[2] == 1:
            return mask
        key = id(mask), num_heads
        if key not in self._masks:  # Holding the mask keeps its id from being reused.
            self._masks[key] = mask, mask.repeat(1, 1, num_heads, 1)
        return self._masks[key][1]


class _ThisThread(threading.local):
    forward: _Forward | None = None


def _attend(
    module: Any,
    query: torch.Tensor,  # (B, heads, Q, D)
    key: torch.Tensor,  # (B, heads of keys, columns, D)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """Replaces stock's sdpa attention; a mask has the shape (B, 1, Q, columns)."""
    forward = _this_thread.forward
    num_sharing = getattr(module, "num_key_value_groups", 1)
    num_joined = 0
    if forward is not None and not _needs_stock(query, attention_mask, others):
        num_joined = _num_joined(query, key, num_sharing, attention_mask)
    if forward is None or not num_joined:
        arguments = {"dropout": dropout, "scaling": scaling, **others}
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, **arguments
        )
    rows, num_heads, width, dim = query.shape
    queries = query.reshape(rows, num_heads // num_joined, num_joined * width, dim)
    outcome = scaled_dot_product_attention(
        queries if queries.shape[2] > 1 else torch.cat([queries, queries], dim=2),
        _copied(key, num_sharing // num_joined),
        _copied(value, num_sharing // num_joined),
        attn_mask=forward.mask_for(num_joined, attention_mask),
        dropout_p=dropout,
        scale=scaling,
    )
    outcome = outcome[:, :, : num_joined * width]
    apart = outcome.view(*outcome.shape[:2], num_joined, width, -1).permute(0, 3, 1, 2, 4)
    return apart.reshape(rows, width, num_heads, -1).contiguous(), None


def _needs_stock(query: torch.Tensor, mask: torch.Tensor | None, others: dict[str, Any]) -> bool:
    """Whether an argument or the shape of the mask is one that only stock can handle."""
    if any(others.get(name) is not None for name in _STOCK_ONLY):
        return True
    return mask is not None and mask.shape[:3] != (query.shape[0], 1, query.shape[2])


def _num_joined(
    query: torch.Tensor, key: torch.Tensor, num_sharing: int, mask: torch.Tensor | None
) -> int:
    """How many heads to join into one; 0 if stock has to compute this, or is as fast.

    All heads that share keys are joined. On a CPU fewer are, if not every thread would have work;
    keys are then copied once for each group of joined heads.
    """
    rows, num_heads, width, _ = query.shape
    if num_heads != key.shape[1] * num_sharing:
        return 0
    on_cpu = query.device.type == "cpu"
    if mask is None or num_sharing == 1:
        return num_sharing if on_cpu and width == 1 and query.dtype in _HALVES else 0
    if width == 1 or not on_cpu:
        return num_sharing
    for number in range(num_sharing, 1, -1):
        num_tasks = rows * (num_heads // number) * -(-number * width // _TASK)
        if num_sharing % number == 0 and num_tasks >= torch.get_num_threads():
            return number
    return 0


def _copied(states: torch.Tensor, number: int) -> torch.Tensor:
    """Repeats each head of keys or values `number` times."""
    return states if number == 1 else states.repeat_interleave(number, dim=1)


_lock = threading.Lock()
_this_thread = _ThisThread()
_num_inside = 0


def _enter() -> bool:
    """Replaces stock's attention with ours; False if other code has replaced it before."""
    global _num_inside
    with _lock:
        if ALL_ATTENTION_FUNCTIONS[_NAME] is sdpa_attention_forward:
            ALL_ATTENTION_FUNCTIONS[_NAME] = _attend
        is_ours = ALL_ATTENTION_FUNCTIONS[_NAME] is _attend
        _num_inside += is_ours
        return is_ours


def _leave() -> None:
    """Puts stock's attention back when the last thread leaves."""
    global _num_inside
    with _lock:
        _num_inside -= 1
        if not _num_inside and ALL_ATTENTION_FUNCTIONS[_NAME] is _attend:
            del ALL_ATTENTION_FUNCTIONS[_NAME]
