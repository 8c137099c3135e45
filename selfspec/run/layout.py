"""From trees to what a forward takes: ids, positions and an additive mask for each attention type.

Pure: reads trees and row lengths, returns tensors. A row's committed tokens fill the columns
from 0 to its length; all trees are appended at one common column, the front, so that rows of
different lengths leave holes that the masks hide.

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

from selfspec.records import DraftTree, Queries

__all__ = ["Layout", "RowPlaces", "Window", "ancestors", "in_window", "lay_out"]


class Window(NamedTuple):
    """How far back an attention type sees, in columns.

    `kind` is ``"full"``, ``"sliding"`` (the last `size` columns) or ``"chunked"`` (the columns of
    the same chunk of `size`, counted from the row's first token).
    """

    kind: str = "full"
    size: int = 0


class RowPlaces(NamedTuple):
    """Where the rows of a forward stand."""

    lengths: list[int]  # committed columns of each row, padding included
    first_positions: NDArray[np.int64]  # (..., B): the position id of each row's first root
    num_moved: list[int]  # how many tokens behind it a row's root stands now
    visible: torch.Tensor | None  # (B, P) bool: prompt columns that count; None: all do


class Layout(NamedTuple):
    """The arguments of one forward."""

    input_ids: torch.Tensor  # (B, Q)
    position_ids: torch.Tensor  # (..., B, Q)
    masks: dict[str, torch.Tensor | None]  # by attention type: (B, 1, Q, columns)


def ancestors(parents: Sequence[Sequence[int]], width: int) -> NDArray[np.bool_]:
    """(trees, width, width): may node i see node j, that is, is j i itself or above it.

    Rows beyond a tree repeat its root's, so that no softmax runs over nothing.

    >>> ancestors([[-1, 0, 0, 1]], 4).astype(int)
    array([[[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]]])
    """
    sees = bytearray().join([row for tree in parents for row in _ancestor_rows(tree, width)])
    return np.frombuffer(sees, np.bool_).reshape(len(parents), width, width)


def _ancestor_rows(parents: Sequence[int], width: int) -> list[bytearray]:
    """A byte for each node: rows so small cost an array or a tensor many times as much."""
    root = bytearray(width)
    root[0] = 1
    rows = [root]
    for node in range(1, len(parents)):
        row = bytearray(rows[parents[node]])
        row[node] = 1
        rows.append(row)
    return rows + [root] * (width - len(parents))


def lay_out(
    trees: Sequence[DraftTree | Queries],
    places: RowPlaces,
    *,
    front: int,
    windows: Mapping[str, Window],
    first_columns: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """Lays the rows' trees side by side, with what rides along, padded to the widest one.

    `first_columns` says, for each attention type, which column its first key stands for: windowed
    layers drop what nobody can see any more. Costs O(B · Q · columns) on the device, and
    O(B · Q²) bytes on the CPU.
    """
    width = max(len(tree.tokens) for tree in trees)
    depths = _padded([tree.depths for tree in trees], width)
    tokens = _padded([tree.tokens for tree in trees], width)
    masker = _Masker(trees, places, front, depths, dtype, device)
    return Layout(
        _sent(np.array(tokens, np.int64), device),
        _sent(places.first_positions[..., None] + _moved(depths, places.num_moved), device),
        {name: masker.mask(window, first_columns[name]) for name, window in windows.items()},
    )


def _padded(lists: Sequence[list[int]], width: int) -> list[list[int]]:
    return [items + items[:1] * (width - len(items)) for items in lists]


def _moved(depths: Sequence[Sequence[int]], by: Sequence[int]) -> NDArray[np.int64]:
    """(B, Q): what stands at a depth, where its row has come so far."""
    rows = [[moved + depth for depth in row] for row, moved in zip(depths, by, strict=True)]
    return np.array(rows, np.int64)


def _sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


class _Masker:
    """Builds the masks of one forward, which differ in their window alone.

    Most need but a few of the tensors that hidden columns are worked out with.
    """

    def __init__(
        self,
        trees: Sequence[DraftTree | Queries],
        places: RowPlaces,
        front: int,
        depths: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._trees = trees
        self._places = places
        self._front = front
        self._depths = depths
        self._dtype = dtype
        self._device = device
        self._width = len(depths[0])
        self._has_holes = places.visible is not None or min(places.lengths) < front
        self._last_column = front + self._width - 1  # no query stands behind it

    @cached_property
    def _hidden(self) -> torch.Tensor:
        """(B, Q, Q): which nodes a node may not see."""
        sees = ancestors([tree.parents for tree in self._trees], self._width)
        return _sent(~sees, self._device)

    @cached_property
    def _lengths(self) -> torch.Tensor:
        return torch.tensor(self._places.lengths, device=self._device)

    @cached_property
    def _query_columns(self) -> torch.Tensor:
        return _sent(_moved(self._depths, self._places.lengths), self._device)  # (B, Q)

    def mask(self, window: Window, first_column: int) -> torch.Tensor | None:
        """(B, 1, Q, front - first_column + Q), 0 where a node may look; None where it always may.

        So it is in most plain steps, which thus go stock's own way.
        """
        reaches_beyond = self._reaches_beyond(window, first_column)
        if self._width == 1 and not self._has_holes and not reaches_beyond:
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
        if reaches_beyond:
            mask.masked_fill_(~self._in_window(window, self._columns(first_column)), lowest)
        return mask[:, None]

    def _columns(self, first_column: int) -> torch.Tensor:
        return torch.arange(first_column, self._front, device=self._device)

    def _reaches_beyond(self, window: Window, first_column: int) -> bool:
        """May a key be too far from a query? Answered from the CPU, for most steps with no."""
        if window.kind == "sliding":
            return first_column <= self._last_column - window.size
        return window.kind == "chunked"

    def _committed(self, columns: torch.Tensor) -> torch.Tensor:
        """(B, 1, columns): is there a token of the row in this column."""
        sees = columns < self._lengths[:, None]
        if (visible := self._places.visible) is not None:
            num_prompt = visible.shape[1]
            known = visible[:, columns.clamp(max=num_prompt - 1)]
            sees = sees & (known | (columns >= num_prompt))
        return sees[:, None]

    def _in_window(self, window: Window, columns: torch.Tensor) -> torch.Tensor:
        """(B, Q, columns + Q): is the key near enough to the query."""
        rows = self._query_columns.shape[0]
        keys = torch.cat([columns.expand(rows, -1), self._query_columns], dim=-1)[:, None]
        starts = self._row_starts() if window.kind == "chunked" else None
        return in_window(window, keys, self._query_columns[:, :, None], starts)

    def _row_starts(self) -> torch.Tensor:
        """(B, 1, 1): the first column that counts, from where chunks are told off."""
        if self._places.visible is None:
            return self._lengths.new_zeros(1, 1, 1)
        return self._places.visible.int().argmax(-1)[:, None, None]


def in_window(
    window: Window, keys: torch.Tensor, queries: torch.Tensor, starts: torch.Tensor | None
) -> torch.Tensor:
    """Is each key, by its column, near enough to each query? Chunks are told off from `starts`."""
    if window.kind == "sliding":
        return keys > queries - window.size
    assert starts is not None
    return (keys - starts) // window.size == (queries - starts) // window.size
