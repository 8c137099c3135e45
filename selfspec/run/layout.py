"""Turns trees into a forward's inputs: ids, positions and one additive mask per attention type.

Reads trees and row lengths, and returns tensors; keeps nothing. A row's committed tokens fill the
columns from 0 to its length. All trees are appended at one common column, the front, so shorter
rows have holes in front of it, which the masks hide.

::

    row 0   t t t t t t | a b c        t committed   . hole   a b c nodes of the tree
    row 1   _ _ t t . . | a b c        _ padding     | front
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.records import DraftTree

__all__ = ["Layout", "RowState", "Window", "ancestors", "in_window", "lay_out"]


class Window(NamedTuple):
    """How far back an attention type sees, in columns.

    `kind` is ``"full"``, ``"sliding"`` (the last `size` columns) or ``"chunked"`` (the columns of
    the same chunk of `size`, where the first chunk begins at the row's first token).
    """

    kind: str = "full"
    size: int = 0


class RowState(NamedTuple):
    """How far the rows of a forward have come."""

    lengths: list[int]  # committed columns of each row, padding included
    first_positions: NDArray[np.int64]  # (..., B): the position id of each row's first root
    num_committed: list[int]  # tokens that each row has gained since its first root
    visible: torch.Tensor | None  # (B, P) bool: which prompt columns count; None if all do


class Layout(NamedTuple):
    """The arguments of one forward."""

    input_ids: torch.Tensor  # (B, Q)
    position_ids: torch.Tensor  # (..., B, Q)
    masks: dict[str, torch.Tensor | None]  # by attention type: (B, 1, Q, columns)


def ancestors(parents: Sequence[Sequence[int]], width: int) -> NDArray[np.bool_]:
    """(trees, width, width): whether node j is node i itself or one of its ancestors.

    Rows beyond a tree's size repeat the root's row, so that no softmax runs over nothing.

    >>> ancestors([[-1, 0, 0, 1]], 4).astype(int)
    array([[[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]]])
    """
    sees = bytearray().join([row for tree in parents for row in _ancestor_rows(tree, width)])
    return np.frombuffer(sees, np.bool_).reshape(len(parents), width, width)


def _ancestor_rows(parents: Sequence[int], width: int) -> list[bytearray]:
    """One byte for each node. For so few, arrays and tensors would be many times slower."""
    root = bytearray(width)
    root[0] = 1
    rows = [root]
    for node in range(1, len(parents)):
        row = bytearray(rows[parents[node]])
        row[node] = 1
        rows.append(row)
    return rows + [root] * (width - len(parents))


def lay_out(
    trees: Sequence[DraftTree],
    state: RowState,
    *,
    front: int,
    windows: Mapping[str, Window],
    first_columns: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """The inputs of one forward over the rows' trees and branches, padded to the widest row.

    `first_columns` has the column of each attention type's first key, since windowed layers drop
    the columns that no query can see any more. Costs O(B · Q · columns) on the device, and
    O(B · Q²) bytes on the CPU.
    """
    width = max(len(tree.tokens) for tree in trees)
    depths = _padded([tree.depths for tree in trees], width)
    tokens = _padded([tree.tokens for tree in trees], width)
    masker = _Masker(trees, state, front, depths, dtype, device)
    return Layout(
        _sent(np.array(tokens, np.int64), device),
        _sent(state.first_positions[..., None] + _shifted(depths, state.num_committed), device),
        {name: masker.mask(window, first_columns[name]) for name, window in windows.items()},
    )


def _padded(lists: Sequence[list[int]], width: int) -> list[list[int]]:
    return [items + items[:1] * (width - len(items)) for items in lists]


def _shifted(depths: Sequence[Sequence[int]], by: Sequence[int]) -> NDArray[np.int64]:
    """(B, Q): the depths, with each row's number added."""
    rows = [[start + depth for depth in row] for row, start in zip(depths, by, strict=True)]
    return np.array(rows, np.int64)


def _sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


class _Masker:
    """Builds the masks of one forward, which differ only in their windows.

    The tensors behind them are made on first use, since most forwards need only a few of them.
    """

    def __init__(
        self,
        trees: Sequence[DraftTree],
        state: RowState,
        front: int,
        depths: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._trees = trees
        self._state = state
        self._front = front
        self._depths = depths
        self._dtype = dtype
        self._device = device
        self._width = len(depths[0])
        self._has_holes = state.visible is not None or min(state.lengths) < front
        self._last_column = front + self._width - 1  # No query has a higher column.

    @cached_property
    def _hidden(self) -> torch.Tensor:
        """(B, Q, Q): True where a node must not see another one."""
        sees = ancestors([tree.parents for tree in self._trees], self._width)
        return _sent(~sees, self._device)

    @cached_property
    def _lengths(self) -> torch.Tensor:
        return torch.tensor(self._state.lengths, device=self._device)

    @cached_property
    def _query_columns(self) -> torch.Tensor:
        return _sent(_shifted(self._depths, self._state.lengths), self._device)  # (B, Q)

    def mask(self, window: Window, first_column: int) -> torch.Tensor | None:
        """The mask (B, 1, Q, front - first_column + Q): 0 where a node may look.

        None if a node may look everywhere. Most plain steps get no mask, so stock's attention
        computes them as it does without us.
        """
        is_limited = self._is_limited(window, first_column)
        if self._width == 1 and not self._has_holes and not is_limited:
            return None
        num_columns = self._front - first_column
        shape = (len(self._depths), self._width, num_columns + self._width)
        mask = torch.zeros(shape, dtype=self._dtype, device=self._device)
        lowest = torch.finfo(self._dtype).min
        if self._width > 1:
            mask[..., num_columns:].masked_fill_(self._hidden, lowest)
        if self._has_holes:
            committed = self._committed(self._columns(first_column))
            mask[..., :num_columns].masked_fill_(~committed, lowest)
        if is_limited:
            mask.masked_fill_(~self._in_window(window, self._columns(first_column)), lowest)
        return mask[:, None]

    def _columns(self, first_column: int) -> torch.Tensor:
        return torch.arange(first_column, self._front, device=self._device)

    def _is_limited(self, window: Window, first_column: int) -> bool:
        """Can a key be outside of a query's window? Decided on the CPU, and for most steps no."""
        if window.kind == "sliding":
            return first_column <= self._last_column - window.size
        return window.kind == "chunked"

    def _committed(self, columns: torch.Tensor) -> torch.Tensor:
        """(B, 1, columns): whether a column holds a token of the row that counts."""
        sees = columns < self._lengths[:, None]
        if (visible := self._state.visible) is not None:
            num_prompt = visible.shape[1]
            known = visible[:, columns.clamp(max=num_prompt - 1)]
            sees = sees & (known | (columns >= num_prompt))
        return sees[:, None]

    def _in_window(self, window: Window, columns: torch.Tensor) -> torch.Tensor:
        """(B, Q, columns + Q): whether each key is in the query's window."""
        rows = self._query_columns.shape[0]
        keys = torch.cat([columns.expand(rows, -1), self._query_columns], dim=-1)[:, None]
        starts = self._row_starts() if window.kind == "chunked" else None
        return in_window(window, keys, self._query_columns[:, :, None], starts)

    def _row_starts(self) -> torch.Tensor:
        """(B, 1, 1): the first column of each row that counts, where its first chunk begins."""
        if self._state.visible is None:
            return self._lengths.new_zeros(1, 1, 1)
        return self._state.visible.int().argmax(-1)[:, None, None]


def in_window(
    window: Window, keys: torch.Tensor, queries: torch.Tensor, starts: torch.Tensor | None
) -> torch.Tensor:
    """Whether each key is in each query's window; all are given by column.

    `starts` are the columns where each row's first chunk begins.
    """
    if window.kind == "sliding":
        return keys > queries - window.size
    assert starts is not None
    return (keys - starts) // window.size == (queries - starts) // window.size
