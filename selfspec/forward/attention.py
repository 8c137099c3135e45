"""Attention for forwards over drafts, without copies of keys and values that heads share.

In most models several query heads share one head of keys and values. If there is a mask, stock's
sdpa attention copies the keys and values of the whole text for each of these query heads, in each
layer and each step. Here the heads that share keys become one head with more queries, and nothing
is copied. Each query sees the same keys as before.

A plain step has no mask, and stock's attention computes it. The exception is half precision on a
CPU, where torch is slow with a single query: there queries are joined too, and a single one is
doubled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from selfspec.compat.generation import attention_functions, sdpa_attention_forward

_NAME = "sdpa"
_HALVES = (torch.bfloat16, torch.float16)
_TASK = 32  # On a CPU, one thread works on this many queries of a head at a time.
# Arguments that only stock's own code understands.
_STOCK_ONLY = ("position_bias", "cache", "softcap")


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Inside, in this thread, sdpa attention joins heads that share keys. Use it for one forward.

    Nothing is changed if other code has replaced stock's attention, or while torch compiles.
    Stock's attention is back in its place when no thread is inside any more.
    """
    if torch.compiler.is_compiling():
        yield
        return
    _replacement.enter()
    outside, _this_thread.masks = _this_thread.masks, {}
    try:
        yield
    finally:
        _this_thread.masks = outside
        _replacement.leave()


class _AttentionCall(NamedTuple):
    """What a layer asks of its attention; a mask has the shape (B, 1, Q, columns)."""

    module: Any
    query: torch.Tensor  # (B, heads, Q, D)
    key: torch.Tensor  # (B, heads of keys, columns, D)
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    scaling: float | None
    others: dict[str, Any]

    @property
    def num_sharing(self) -> int:
        return getattr(self.module, "num_key_value_groups", 1)

    @property
    def needs_stock(self) -> bool:
        """Whether an argument or the shape of the mask is one that only stock can handle."""
        if any(self.others.get(name) is not None for name in _STOCK_ONLY):
            return True
        if self.query.shape[1] != self.key.shape[1] * self.num_sharing:
            return True
        rows, _, width, _ = self.query.shape
        return self.mask is not None and self.mask.shape[:3] != (rows, 1, width)

    def of_stock(self) -> torch.Tensor:
        options = {"dropout": self.dropout, "scaling": self.scaling, **self.others}
        return sdpa_attention_forward(*self[:5], **options)[0]  # type: ignore[no-any-return]

    def joined_queries(self, number: int) -> torch.Tensor:
        """(B, heads / number, number * Q, D): the queries of this many heads at a time as one's."""
        rows, num_heads, width, dim = self.query.shape
        return self.query.reshape(rows, num_heads // number, number * width, dim)

    def apart(self, outcome: torch.Tensor) -> torch.Tensor:
        """The outcome (B, Q, heads, D) of joined queries, as stock returns it."""
        rows, num_heads, width, _ = self.query.shape
        heads = outcome.reshape(rows, num_heads, width, -1)
        return heads.transpose(1, 2).contiguous()


_Masks = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


class _ThisThread(threading.local):
    masks: _Masks | None = None  # Those for joined heads, which all layers of a forward share.


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
    """Replaces stock's sdpa attention; does the same outside of `grouped_attention`."""
    asked = _AttentionCall(module, query, key, value, attention_mask, dropout, scaling, others)
    if torch.compiler.is_compiling():
        return _traced(asked), None
    masks = _this_thread.masks
    return asked.of_stock() if masks is None else _joined(asked, masks), None


def _joined(asked: _AttentionCall, masks: _Masks) -> torch.Tensor:
    """The outcome (B, Q, heads, D); heads are joined where that is faster."""
    number = 0 if asked.needs_stock else _num_joined(asked.query, asked.num_sharing, asked.mask)
    if not number:
        return asked.of_stock()
    queries, num_copies = asked.joined_queries(number), asked.num_sharing // number
    doubles = queries.device.type == "cpu" and queries.shape[2] == 1
    outcome = scaled_dot_product_attention(
        torch.cat([queries, queries], dim=2) if doubles else queries,
        _copied(asked.key, num_copies),
        _copied(asked.value, num_copies),
        attn_mask=_mask_for(number, asked.mask, masks),
        dropout_p=asked.dropout,
        scale=asked.scaling,
    )
    return asked.apart(outcome[:, :, : queries.shape[2]])


def _mask_for(num_heads: int, mask: torch.Tensor | None, masks: _Masks) -> torch.Tensor | None:
    """The mask (B, 1, heads * Q, columns) for joined heads, made once."""
    if mask is None or num_heads == 1 or mask.shape[2] == 1:
        return mask
    key = id(mask), num_heads
    if key not in masks:  # Holding the mask keeps its id from being reused.
        masks[key] = mask, mask.repeat(1, 1, num_heads, 1)
    return masks[key][1]


def _traced(asked: _AttentionCall) -> torch.Tensor:
    """The outcome as a part of a compiled layer: all heads that share keys are joined."""
    mask, number = asked.mask, asked.num_sharing
    if mask is None or number == 1 or asked.needs_stock:
        return asked.of_stock()
    outcome = scaled_dot_product_attention(
        asked.joined_queries(number),
        asked.key,
        asked.value,
        attn_mask=mask.repeat(1, 1, number, 1),
        dropout_p=asked.dropout,
        scale=asked.scaling,
    )
    return asked.apart(outcome)


def _num_joined(query: torch.Tensor, num_sharing: int, mask: torch.Tensor | None) -> int:
    """How many heads to join into one; 0 if stock must compute this, or is as fast.

    All heads that share keys are joined. On a CPU, fewer are joined if some threads would have no
    work; keys are then copied once for each group of joined heads.
    """
    rows, num_heads, width, _ = query.shape
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
    return states if number == 1 else states.repeat_interleave(number, dim=1)


class _Replacement:
    """Our attention in place of stock's, as long as a forward of any thread needs it.

    Attention that other code registers is left alone, whether it came before or meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_forwards = 0

    def enter(self) -> None:
        with self._lock:
            self._num_forwards += 1
            self._exchange(sdpa_attention_forward, _attend)

    def leave(self) -> None:
        with self._lock:
            self._num_forwards -= 1
            if not self._num_forwards:
                self._exchange(_attend, sdpa_attention_forward)

    def _exchange(self, present: Any, wanted: Any) -> None:
        functions = attention_functions()
        if functions[_NAME] is present:
            functions.register(_NAME, wanted)


_this_thread = _ThisThread()
_replacement = _Replacement()
