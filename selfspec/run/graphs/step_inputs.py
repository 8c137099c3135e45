"""The inputs of one forward of fixed shape, in a single tensor of numbers.

The CPU writes the tensor (`InputWriter`) and one copy brings it to the device. There
`static_layout` turns views of it into ids, positions and masks, with operations that depend on
the shape of the forward alone. So a graph that was captured once serves every step of its shape.

A forward may be wider than its widest tree and have more rows than are left. Its surplus nodes
repeat a root and see what a root sees, and no other node sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.records import DraftTree
from selfspec.run.layout import Layout, Window, in_window

__all__ = ["InputShape", "InputWriter", "StepState", "static_layout"]

_WORD = 64  # An int64 has bits for this many nodes.


class InputShape(NamedTuple):
    """Everything that the shapes of a forward's inputs depend on."""

    rows: int
    width: int
    lead: tuple[int, ...]  # the dimensions of the position ids in front of their rows
    num_types: int  # how many attention types the model has

    def fields(self) -> _Fields:
        """The shape of each field."""
        rows, width, lead, num_types = self
        words = -(-width // _WORD)
        return _Fields(
            ids=(rows, width),
            depths=(rows, width),
            bits=(rows, width, words),
            positions=(*lead, rows),
            lengths=(rows,),
            starts=(rows,),
            firsts=(num_types,),
            front=(1,),
        )

    @property
    def size(self) -> int:
        """How many numbers the inputs have."""
        return sum(map(prod, self.fields()))


class _Fields(NamedTuple):
    """The parts of the inputs: shapes, or views of these shapes."""

    ids: Any  # (R, W)
    depths: Any  # (R, W)
    bits: Any  # (R, W, words): which nodes a node sees
    positions: Any  # (..., R): the position id of each row's root
    lengths: Any  # (R,): committed columns
    starts: Any  # (R,): the first column that counts
    firsts: Any  # (types,): the column that the first slot stands for
    front: Any  # (1,): the column where the trees begin


class StepState(NamedTuple):
    """How far the rows of a forward have come, as the CPU knows it."""

    lengths: Sequence[int]  # the committed columns of each row
    positions: NDArray[np.int64]  # (..., rows): the position id of each row's root
    starts: Sequence[int]  # the first column of each row that counts
    firsts: Sequence[int]  # the column that each attention type's first slot stands for
    front: int  # the column where the trees begin


class InputWriter:
    """Writes the inputs of one shape into a tensor on the CPU."""

    def __init__(self, shape: InputShape) -> None:
        self._width = shape.width
        self._flat = torch.zeros(shape.size, dtype=torch.long, device="cpu")
        self._fields = _Fields(*(part.numpy() for part in _split(self._flat, shape)))
        self._fields.bits[..., 0] = 1  # A row without a tree sees its root.

    def write(self, trees: Sequence[DraftTree], state: StepState) -> torch.Tensor:
        """The inputs (size,) of some trees; send them before the next ones are written."""
        fields = self._fields
        num_rows = len(trees)
        for row, tree in enumerate(trees):
            num_nodes = len(tree.tokens)
            fields.ids[row, :num_nodes] = tree.tokens
            fields.ids[row, num_nodes:] = tree.tokens[0]
            fields.depths[row, :num_nodes] = tree.depths
            fields.depths[row, num_nodes:] = 0
            fields.bits[row] = _ancestor_words(tree.parents, self._width)
        fields.positions[..., :num_rows] = state.positions
        fields.lengths[:num_rows] = state.lengths
        fields.starts[:num_rows] = state.starts
        fields.firsts[:] = state.firsts
        fields.front[:] = state.front
        if num_rows < len(fields.lengths):
            _clear_from(num_rows, fields)
        return self._flat


def _clear_from(num_rows: int, fields: _Fields) -> None:
    """Empties the rows that an earlier step filled: they see no committed column any more."""
    fields.lengths[num_rows:] = 0
    fields.depths[num_rows:] = 0
    fields.bits[num_rows:] = 0
    fields.bits[num_rows:, :, 0] = 1


class StaticForward(NamedTuple):
    """The arguments of a forward, and the slots that its keys and values go to."""

    layout: Layout
    slots: dict[str, torch.Tensor]  # (W,) for each attention type
    front: torch.Tensor  # (): the column where the trees begin


def static_layout(
    flat: torch.Tensor,  # (size,)
    shape: InputShape,
    *,
    windows: Mapping[str, Window],
    num_keys: Mapping[str, int],
    visible: torch.Tensor,  # (>= R, columns) bool: which columns count; the last one does
    dtype: torch.dtype,
) -> StaticForward:
    """The same as `layout.lay_out` gives for these trees, with `num_keys` columns in each mask."""
    fields = _split(flat, shape)
    masker = _StaticMasker(fields, visible[: shape.rows], dtype)
    nodes = torch.arange(shape.width, device=flat.device)
    masks: dict[str, torch.Tensor | None] = {}
    slots: dict[str, torch.Tensor] = {}
    for index, (name, window) in enumerate(windows.items()):
        first = fields.firsts[index]
        masks[name] = masker.mask(window, first, num_keys[name])
        slots[name] = fields.front - first + nodes
    layout = Layout(fields.ids, fields.positions[..., None] + fields.depths, masks)
    return StaticForward(layout, slots, fields.front[0])


class _StaticMasker:
    """Builds the masks of one forward on its device; the CPU reads none of the numbers."""

    def __init__(self, fields: _Fields, visible: torch.Tensor, dtype: torch.dtype) -> None:
        self._fields = fields
        self._visible = visible
        self._dtype = dtype
        self._query_columns = fields.lengths[:, None] + fields.depths  # (R, W)
        self._tree_sees = _unpacked(fields.bits)  # (R, W, W)

    def mask(self, window: Window, first: torch.Tensor, num_keys: int) -> torch.Tensor:
        """The mask (R, 1, W, num_keys) of a window: 0 where a node may look."""
        width = self._query_columns.shape[1]
        columns = first + torch.arange(num_keys, device=first.device)
        nodes = columns - self._fields.front
        is_node = (nodes >= 0) & (nodes < width)
        nodes = nodes.clamp(0, width - 1)
        sees = torch.where(
            is_node, self._tree_sees.index_select(2, nodes), self._committed(columns)[:, None]
        )
        if window.kind != "full":
            keys = torch.where(is_node, self._query_columns.index_select(1, nodes), columns)
            sees = sees & self._in_window(window, keys)
        mask = torch.zeros(sees.shape, dtype=self._dtype, device=sees.device)
        return mask.masked_fill_(~sees, torch.finfo(self._dtype).min)[:, None]

    def _committed(self, columns: torch.Tensor) -> torch.Tensor:
        """(R, columns): whether a column holds a token of the row that counts."""
        known = self._visible.index_select(1, columns.clamp(max=self._visible.shape[1] - 1))
        lengths: torch.Tensor = self._fields.lengths[:, None]
        return (columns < lengths) & known

    def _in_window(self, window: Window, keys: torch.Tensor) -> torch.Tensor:
        """(R, W, columns): whether each key, given by its column (R, columns), is in the window."""
        starts = self._fields.starts[:, None, None]
        return in_window(window, keys[:, None], self._query_columns[:, :, None], starts)


def _split(flat: torch.Tensor, shape: InputShape) -> _Fields:
    """Views of the parts of the inputs."""
    shapes = shape.fields()
    parts = torch.split(flat, [prod(part) for part in shapes])
    return _Fields(*(part.view(size) for part, size in zip(parts, shapes, strict=True)))


def _ancestor_words(parents: Sequence[int], width: int) -> NDArray[np.int64]:
    """(W, words): which nodes each node sees, itself and those above it, with one bit for each.

    Surplus nodes see what the root does.

    >>> _ancestor_words([-1, 0, 0, 1], 5)[:, 0]
    array([ 1,  3,  5, 11,  1])
    """
    bits = [1]
    for node in range(1, len(parents)):
        bits.append(bits[parents[node]] | 1 << node)
    num_bytes = -(-width // _WORD) * _WORD // 8
    rows = [each.to_bytes(num_bytes, "little") for each in bits]
    rows += rows[:1] * (width - len(rows))
    return np.frombuffer(b"".join(rows), "<i8").reshape(width, -1)


def _unpacked(bits: torch.Tensor) -> torch.Tensor:
    """The bool matrices (R, W, W) whose bits are given (R, W, words)."""
    shifts = torch.arange(_WORD, device=bits.device)
    sees = (bits[..., None] >> shifts) & 1
    return sees.flatten(-2)[..., : bits.shape[1]].bool()
