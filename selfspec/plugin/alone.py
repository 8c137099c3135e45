"""Each query of a forward asked alone, over keys that lie in line, as in stock's plain steps.

What attention comes to hangs, in its last bits, on where the keys lie and on how many queries are
asked together. So each query is handed to stock's own function by itself: it comes to the very bits
of a plain step, and costs as much as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward

__all__ = ["Keys", "attend_alone", "keys_in"]


class Keys(NamedTuple):
    """Those of one query."""

    row: int
    query: int
    first: int  # the columns from here
    end: int  # to here are in line
    others: torch.Tensor | None  # and these come behind them
    mask: torch.Tensor | None  # (1, 1, 1, columns), where stock would have one

    def taken_from(self, states: torch.Tensor) -> torch.Tensor:
        """The keys or values (1, H, columns, D) out of all (B, H, columns, D)."""
        own = states[self.row : self.row + 1]
        in_line = own[:, :, self.first : self.end]
        if self.others is None:
            return in_line
        return torch.cat([in_line, own[:, :, self.others]], dim=2)


def keys_in(mask: torch.Tensor, window: int | None) -> list[Keys]:
    """Each query's keys, the first row's first, by a mask (B, 1, Q, columns) on a CPU.

    As stock keeps them: what a row's padding hides is there, and hidden by a mask; what has left a
    window of so many columns is gone, and then there is a mask, too.
    """
    sees = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0
    table: NDArray[np.bool_] = sees.numpy()
    is_padded = not table[:, :, 0].all()
    return [
        _keys(row, query, table[row, query].nonzero()[0], is_padded, window)
        for row in range(table.shape[0])
        for query in range(table.shape[1])
    ]


def _keys(
    row: int, query: int, columns: NDArray[np.int64], is_padded: bool, window: int | None
) -> Keys:
    num_in_line = int((np.diff(columns) == 1).cumprod().sum()) + 1
    start, end = int(columns[0]), int(columns[num_in_line - 1]) + 1
    fills_window = len(columns) == window
    first = start if fills_window else 0
    mask = None
    if is_padded or fills_window:
        mask = torch.ones(1, 1, 1, start - first + len(columns), dtype=torch.bool)
        mask[..., : start - first] = False
    others = torch.from_numpy(columns[num_in_line:]) if num_in_line < len(columns) else None
    return Keys(row, query, first, end, others, mask)


def attend_alone(
    module: Any,
    query: torch.Tensor,  # (B, heads, Q, D)
    key: torch.Tensor,  # (B, heads of keys, columns, D)
    value: torch.Tensor,
    keys: Sequence[Keys],  # of each query, the first row's first
    **arguments: Any,  # of stock's function
) -> torch.Tensor:
    """The outcomes (B, Q, heads, D)."""
    outcomes = [
        sdpa_attention_forward(
            module,
            query[each.row : each.row + 1, :, each.query : each.query + 1],
            each.taken_from(key),
            each.taken_from(value),
            each.mask,
            **arguments,
        )[0]
        for each in keys
    ]
    whole = torch.cat(outcomes)  # (B * Q, 1, heads, D)
    return whole.view(query.shape[0], query.shape[2], *whole.shape[2:])
