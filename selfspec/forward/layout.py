"""Turns trees into a forward's inputs: ids, positions and one additive mask per attention type.

On the CPU, `pack_inputs` writes everything that a forward depends on into one tensor of numbers,
which is copied to the device at once. There `unpack_inputs` turns views of it into ids, positions
and masks. Its operations depend only on the shape of the forward, so a captured graph serves every
step of that shape.

A row's committed tokens fill the columns from 0 to its length. All trees begin at one common
column, `tree_start`. Shorter rows have holes before it, which the masks hide.

::

    row 0   t t t t t t | a b c        t committed   . hole   a b c nodes of the tree
    row 1   _ _ t t . . | a b c        _ padding     | tree_start

A forward may be wider than its widest tree and have more rows than there are trees. The surplus
nodes repeat a root and see what the root sees. No other node sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.forward.columns import KVRow
from selfspec.forward.states.rules import Ancestry
from selfspec.records import DraftTree


class Window(NamedTuple):
    """How far back an attention type sees, in columns.

    `form` is ``"full"``, ``"sliding"`` (the last `size` columns) or ``"chunked"`` (the columns of
    the same chunk of `size`, where the first chunk begins at the row's first token).
    """

    form: str = "full"
    size: int = 0


class InputShape(NamedTuple):
    """Everything that the shapes of a forward's inputs depend on."""

    rows: int
    width: int
    lead: tuple[int, ...]  # the dimensions of the position ids before their rows
    num_types: int  # how many attention types the model has

    @property
    def sizes(self) -> list[int]:
        """How many numbers the parts of the inputs have, in their order."""
        rows, width, lead, num_types = self
        unseen = -(-rows * width * width // 8)  # Eight bytes are a number.
        by_type = num_types * (2 * rows + width + 1)
        return [2 * rows * width, 1, by_type, rows * width * prod(lead), unseen]


class _Columns(NamedTuple):
    """What an attention type needs; columns are counted from the one of its first slot."""

    lengths: torch.Tensor  # (R,)
    starts: torch.Tensor  # (R,)
    slots: torch.Tensor  # (W,): which of the keys are the trees' nodes
    first: torch.Tensor  # (1,): the first slot's column


class Layout(NamedTuple):
    """The arguments of one forward, and where its keys and values go."""

    input_ids: torch.Tensor  # (R, W)
    position_ids: torch.Tensor  # (..., R, W)
    masks: dict[str, torch.Tensor | None]  # by attention type: (R, 1, W, columns)
    slots: dict[str, torch.Tensor]  # by attention type: (W,)
    tree_start: torch.Tensor  # (): the column where the trees begin
    ancestry: Ancestry

    def num_keys(self, attention_type: str) -> int:
        mask = self.masks[attention_type]
        assert mask is not None
        return mask.shape[-1]


class TreePlacement(NamedTuple):
    """Where the trees of one forward lie, one for each of some rows.

    All trees begin at the column `tree_start`, which is the length of the longest row. `firsts`
    has, by attention type, the column of the first slot: windowed layers may drop columns that no
    query can see any more. A captured forward has a `layout`, which says on the device what Python
    must not know.
    """

    rows: Sequence[KVRow]
    tree_start: int
    firsts: Mapping[str, int]
    layout: Layout | None = None

    @property
    def lengths(self) -> list[int]:
        """The committed columns of each row, padding included."""
        return [row.num_columns for row in self.rows]

    @property
    def positions(self) -> NDArray[Any]:
        """(..., B): the position id of each row's root."""
        return np.stack([row.position for row in self.rows], axis=-1)


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
    """Each node's ancestors, a byte each. Arrays would be many times slower for small trees."""
    root = bytearray(width)
    root[0] = 1
    rows = [root]
    for node in range(1, len(parents)):
        row = bytearray(rows[parents[node]])
        row[node] = 1
        rows.append(row)
    return rows + [root] * (width - len(parents))


def hiding(
    windows: Mapping[str, Window], forward: TreePlacement, width: int, *, has_padding: bool
) -> dict[str, Window | None]:
    """The windows of a forward, without those that hide nothing from any of its queries.

    A type that needs no mask at all has None. In most plain steps no type needs one, and
    transformers' attention computes them as it does without selfspec.
    """
    last_column = forward.tree_start + width - 1  # No query has a higher column.
    needs_none = width == 1 and not has_padding and min(forward.lengths) == forward.tree_start
    without_mask = None if needs_none else _FULL
    hiding_some: dict[str, Window | None] = {}
    for name, window in windows.items():
        hides = window.form == "chunked"
        if window.form == "sliding":
            hides = forward.firsts[name] <= last_column - window.size
        hiding_some[name] = window if hides else without_mask
    return hiding_some


def pack_inputs(
    trees: Sequence[DraftTree], forward: TreePlacement, shape: InputShape
) -> torch.Tensor:
    """The inputs (numbers,) of one forward over the rows' trees and branches, on the CPU.

    What the CPU can work out costs the device no operation.
    """
    rows, width, lead, _ = shape
    surplus = rows - len(trees)
    trees = [*trees, *[_NO_TREE] * surplus]
    ids, depths, nothing = [], [], [0] * surplus
    for tree in trees:
        missing = width - len(tree.tokens)
        ids += tree.tokens + tree.tokens[:1] * missing
        depths += tree.depths + [0] * missing
    starts = [row.start for row in forward.rows]
    columns = [*forward.lengths, *nothing, *starts, *nothing]
    numbers = [*ids, *depths, forward.tree_start]
    for first in forward.firsts.values():
        numbers += [column - first for column in columns] if first else columns
        numbers += range(forward.tree_start - first, forward.tree_start - first + width)
        numbers.append(first)
    positions = forward.positions
    if surplus:
        positions = np.zeros((*lead, rows), np.int64)
        positions[..., :-surplus] = forward.positions
    parts = np.array(numbers, np.int64)
    depths_of = parts[rows * width : 2 * rows * width].reshape(rows, width)
    unseen = ~ancestors([tree.parents for tree in trees], width)
    words = np.frombuffer(unseen.tobytes() + bytes(-unseen.size % 8), np.int64)
    positions = positions[..., None] + depths_of
    return torch.from_numpy(np.concatenate([parts, positions.ravel(), words]))


def unpack_inputs(
    flat: torch.Tensor,  # (numbers,)
    shape: InputShape,
    *,
    windows: Mapping[str, Window | None],
    num_keys: Mapping[str, int],
    visible: torch.Tensor | None,  # (>= R, columns) bool: which columns count; the last one does
    dtype: torch.dtype,
) -> Layout:
    """The inputs of one forward, with `num_keys` columns in the mask of each attention type.

    Costs O(R · W · columns) on the device of `flat`; on CUDA, the CPU reads none of its numbers.
    """
    rows, width, lead, num_types = shape
    nodes, tree_start, by_type, positions, words = torch.split(flat, shape.sizes)
    ids, depths = nodes.view(2, rows, width).unbind()  # (R, W)
    # (R, W, W) bool: is node j neither node i nor one of its ancestors?
    unseen = words.view(torch.bool)[: rows * width * width].view(rows, width, width)
    ancestry = Ancestry(unseen, depths)
    columns = torch.arange(max(num_keys.values(), default=0), device=flat.device)
    shown = None if visible is None else visible[:rows]
    masks: dict[str, torch.Tensor | None] = {}
    slots: dict[str, torch.Tensor] = {}
    types = by_type.view(num_types, 2 * rows + width + 1).unbind()
    for (name, window), numbers in zip(windows.items(), types, strict=True):
        of_type = _Columns(*torch.split(numbers, [rows, rows, width, 1]))
        slots[name], masks[name] = of_type.slots, None
        if window is not None:
            keys = columns[: num_keys[name]]
            masks[name] = _mask(ancestry, of_type, window, keys, shown, dtype)
    return Layout(ids, positions.view(*lead, rows, width), masks, slots, tree_start[0], ancestry)


def _mask(
    ancestry: Ancestry,
    of_type: _Columns,
    window: Window,
    columns: torch.Tensor,  # (K,): the columns of the keys
    visible: torch.Tensor | None,  # (R, columns)
    dtype: torch.dtype,
) -> torch.Tensor:
    """The mask (R, 1, W, K) of a window: 0 where a node may look, else the lowest number."""
    lengths, unseen = of_type.lengths[:, None, None], ancestry.unseen
    width = len(of_type.slots)
    hidden = columns >= lengths.expand(-1, width, -1)  # (R, W, K)
    if visible is not None:
        known = (columns + of_type.first).clamp(max=visible.shape[1] - 1)
        hidden |= ~visible.index_select(1, known)[:, None]
    if window.form != "full":
        queries = lengths + ancestry.depths[..., None]  # (R, W, 1)
        starts = of_type.starts[:, None, None]
        hidden |= _is_outside(window, columns, queries, starts)
        if window.form == "chunked" or window.size < width:  # Wider ones show the whole path.
            unseen = unseen | _is_outside(window, queries.mT, queries, starts)
    hidden.index_copy_(2, of_type.slots, unseen)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def _is_outside(
    window: Window, keys: torch.Tensor, queries: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Whether keys are in front of queries' windows; all are given by column.

    `starts` are the columns where the rows' first chunks begin.
    """
    if window.form == "sliding":
        return keys <= queries - window.size
    return (keys - starts) // window.size != (queries - starts) // window.size


_FULL = Window()
_NO_TREE = DraftTree.of_root(0)
