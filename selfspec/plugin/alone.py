"""Each query of a forward as if asked alone, over keys that lie in line, as in stock's plain steps.

What attention comes to hangs, in its last bits, on where the keys lie and on how many queries are
asked together. So each query is handed to stock's own function by itself: it comes to the very bits
of a plain step, and costs as much as one. Code of our own that comes to the same bits takes a tenth
of that, where there is such.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from selfspec.native import Lines, attend, attends

__all__ = ["Keys", "Row", "attend_alone", "goes_native", "rows_in", "rows_that_see_all"]


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


class Row:
    """What the queries of one row see."""

    def __init__(
        self, row: int, sees: NDArray[np.bool_], *, is_padded: bool, window: int | None
    ) -> None:
        self._row = row
        self._sees = sees  # (Q, columns)
        self._is_padded = is_padded
        self._window = window

    @cached_property
    def keys(self) -> list[Keys]:
        """Those of each query."""
        return [
            _keys(self._row, query, columns.nonzero()[0], self._is_padded, self._window)
            for query, columns in enumerate(self._sees)
        ]

    @cached_property
    def lines(self) -> Lines | None:
        """The same for all at once; None where stock would have a mask."""
        lines = Lines.of(self._sees)
        return None if self._is_padded or self._window in lines.lengths.tolist() else lines


def rows_that_see_all(num_rows: int, num_columns: int) -> list[Row]:
    """Of a plain step without a mask."""
    sees = np.ones((1, num_columns), dtype=np.bool_)
    return [Row(row, sees, is_padded=False, window=None) for row in range(num_rows)]


def rows_in(mask: torch.Tensor, window: int | None) -> list[Row]:
    """What each row's queries see, by a mask (B, 1, Q, columns) on a CPU.

    Keys are as stock keeps them: what a row's padding hides is there, and hidden by a mask; what
    has left a window of so many columns is gone, and then there is a mask, too.
    """
    sees = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0
    table: NDArray[np.bool_] = sees.numpy()
    is_padded = not bool(table[:, :, 0].all())
    return [
        Row(row, of_row, is_padded=is_padded, window=window) for row, of_row in enumerate(table)
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


def goes_native(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> bool:
    """Is there code of our own for such states (B, heads, …, D), to stock's bits?"""
    return (
        query.shape[1] > 1  # a head of its own is left to several threads together
        and query.dtype is key.dtype is value.dtype
        and key.shape == value.shape
        and key.shape[3] == query.shape[3]
        and not dropout
        and not torch.is_autocast_enabled("cpu")
        and attends(query.dtype, query.shape[3])
    )


def attend_alone(
    module: Any,
    query: torch.Tensor,  # (B, heads, Q, D)
    key: torch.Tensor,  # (B, heads of keys, columns, D)
    value: torch.Tensor,
    rows: Sequence[Row],
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,  # of stock's function
) -> torch.Tensor:
    """The outcomes (B, Q, heads, D)."""
    outcomes = []
    is_native = goes_native(query, key, value, dropout)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    for number, row in enumerate(rows):
        if is_native and row.lines is not None:
            outcomes.append(attend(query[number], key[number], value[number], row.lines, scale))
            continue
        outcomes += [
            sdpa_attention_forward(
                module,
                query[number : number + 1, :, each.query : each.query + 1],
                each.taken_from(key),
                each.taken_from(value),
                each.mask,
                dropout=dropout,
                scaling=scaling,
                **others,
            )[0][0]
            for each in row.keys
        ]
    whole = torch.cat(outcomes)  # (B * Q, heads, D)
    return whole.view(query.shape[0], query.shape[2], *whole.shape[1:])
