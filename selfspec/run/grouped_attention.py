"""Attention of a forward over drafts, with grouped heads asked together.

Most models have several heads of queries for one of keys and values. As soon as there is a mask,
stock's sdpa attention copies keys and values for every head that shares them: the whole text's, in
each layer and each step. Here the queries of such heads stand one behind the other as queries of
one head, and nothing is copied. Each query sees what it saw before.

A plain step has no mask, and goes stock's own way. Only in half precision on a CPU, where torch's
code for a single query is slow, are queries still asked together, or a lone one twice.
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
_TASK = 32  # queries of a head that one thread of a CPU works on at a time
_NO_OTHERS = ("position_bias", "cache", "softcap")  # arguments that only stock's own code serves


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Inside, and in this thread alone, sdpa attention asks grouped heads together; one forward.

    An attention that somebody else put in stock's place is left alone, and so is torch while it
    compiles, which makes code of its own.
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
    """What the layers of one forward have in common."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def mask_for(self, num_heads: int, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask (B, 1, Q, columns) of so many heads one behind the other, made once."""
        if mask is None or mask.shape[2] == 1:
            return mask
        key = id(mask), num_heads
        if key not in self._masks:  # The mask itself is held, so that no other one gets its id.
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
    """Stands in for stock's sdpa attention."""
    forward = _this_thread.forward
    num_sharing = getattr(module, "num_key_value_groups", 1)
    num_together = 0
    if forward is not None and not _needs_stock(query, attention_mask, others):
        num_together = _num_together(query, key, num_sharing, attention_mask)
    if forward is None or not num_together:
        arguments = {"dropout": dropout, "scaling": scaling, **others}
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, **arguments
        )
    rows, num_heads, width, dim = query.shape
    queries = query.reshape(rows, num_heads // num_together, num_together * width, dim)
    outcome = scaled_dot_product_attention(
        queries if queries.shape[2] > 1 else torch.cat([queries, queries], dim=2),
        _copied(key, num_sharing // num_together),
        _copied(value, num_sharing // num_together),
        attn_mask=forward.mask_for(num_together, attention_mask),
        dropout_p=dropout,
        scale=scaling,
    )
    outcome = outcome[:, :, : num_together * width]
    apart = outcome.view(*outcome.shape[:2], num_together, width, -1).permute(0, 3, 1, 2, 4)
    return apart.reshape(rows, width, num_heads, -1).contiguous(), None


def _needs_stock(query: torch.Tensor, mask: torch.Tensor | None, others: dict[str, Any]) -> bool:
    """Is there more to these queries than a mask for all heads says?"""
    if any(others.get(name) is not None for name in _NO_OTHERS):
        return True
    return mask is not None and mask.shape[:3] != (query.shape[0], 1, query.shape[2])


def _num_together(
    query: torch.Tensor, key: torch.Tensor, num_sharing: int, mask: torch.Tensor | None
) -> int:
    """How many heads are asked as one; 0 where stock's way is the only one, or as good.

    All that share keys, but on a CPU only as many as leave work for every thread: then keys are
    copied for some of them still.
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
    """Each head of keys or values so many times."""
    return states if number == 1 else states.repeat_interleave(number, dim=1)


_lock = threading.Lock()
_this_thread = _ThisThread()
_num_inside = 0


def _enter() -> bool:
    """Puts our attention in the place of stock's; False where that is another one's."""
    global _num_inside
    with _lock:
        if ALL_ATTENTION_FUNCTIONS[_NAME] is sdpa_attention_forward:
            ALL_ATTENTION_FUNCTIONS[_NAME] = _attend
        is_ours = ALL_ATTENTION_FUNCTIONS[_NAME] is _attend
        _num_inside += is_ours
        return is_ours


def _leave() -> None:
    """The last one takes it away again."""
    global _num_inside
    with _lock:
        _num_inside -= 1
        if not _num_inside and ALL_ATTENTION_FUNCTIONS[_NAME] is _attend:
            del ALL_ATTENTION_FUNCTIONS[_NAME]
