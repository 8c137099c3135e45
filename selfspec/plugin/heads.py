"""How the queries of a forward over drafts are put to attention.

*Free*: together those of heads that share a head of keys and values. As soon as there is a mask,
stock's sdpa attention copies keys and values for every head that shares them: the whole text's, in
each layer and each step. Here the queries of such heads stand one behind the other as queries of
one head, and nothing is copied. Each query sees what it saw. Where a head has but one query, in
half precision on a CPU, it is asked twice: for one alone torch's code is a slow one.

*Stock*: each as if by itself, which comes to the very bits of a plain step.

Without a mask, as in most plain steps, stock's own way copies nothing, and is taken, but where
torch's code for it is the slow one and there is another.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec.packed import HALVES
from selfspec.plugin.alone import (
    Row,
    attend_alone,
    goes_native,
    rows_in,
    rows_that_see_all,
)

__all__ = ["Rounding", "attending"]

Rounding = Literal["free", "stock"]  # as in `SpecConfig`, where it can be had

_NAME = "sdpa"
_TASK = 32  # queries of a head that one thread of a CPU works on at a time
_NO_OTHERS = ("position_bias", "cache", "softcap")  # arguments that are stock's own matter


@contextmanager
def attending(rounding: Rounding = "free") -> Iterator[None]:
    """Inside, and in this thread alone, sdpa attention comes to such bits; for one forward.

    ``"free"`` is for all devices, ``"stock"`` for CPUs. An attention that somebody else put in
    stock's place is left alone, and so is torch while it compiles, which makes code of its own.
    """
    if torch.compiler.is_compiling() or not _enter():
        yield
        return
    outside, _this_thread.forward = _this_thread.forward, _Forward(rounding)
    try:
        yield
    finally:
        _this_thread.forward = outside
        _leave()


class _Forward:
    """What the layers of one forward have in common."""

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding
        self._masks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: dict[Hashable, tuple[torch.Tensor | None, list[Row]]] = {}

    def rows_in(
        self, mask: torch.Tensor | None, key: torch.Tensor, window: int | None
    ) -> list[Row]:
        """What each row's queries see, found once; without a mask all of the keys there are."""
        what: Hashable = key.shape[2] if mask is None else (id(mask), window)
        if what not in self._rows:
            if mask is None:
                rows = rows_that_see_all(len(key), key.shape[2])
            else:
                rows = rows_in(mask, window)
            self._rows[what] = mask, rows  # held, so that no other mask gets its id
        return self._rows[what][1]

    def mask_for(self, num_heads: int, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask (B, 1, Q, columns) of so many heads one behind the other, made once."""
        if mask is None or mask.shape[2] == 1:
            return mask
        key = id(mask), num_heads
        if key not in self._masks:  # the mask itself is held, so that no other one gets its id
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
    arguments = {"dropout": dropout, "scaling": scaling, **others}
    num_sharing = getattr(module, "num_key_value_groups", 1)
    num_together = 0
    if forward is not None and not _are_stocks_own(query, attention_mask, others):
        if forward.rounding == "free":
            num_together = _num_together(query, key, num_sharing, attention_mask)
        elif attention_mask is not None or (
            query.shape[2] == 1 and goes_native(query, key, value, dropout)
        ):
            seen = forward.rows_in(attention_mask, key, others.get("sliding_window"))
            return attend_alone(module, query, key, value, seen, **arguments), None
    if forward is None or not num_together:
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


def _are_stocks_own(query: torch.Tensor, mask: torch.Tensor | None, others: dict[str, Any]) -> bool:
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
        return num_sharing if on_cpu and width == 1 and query.dtype in HALVES else 0
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
