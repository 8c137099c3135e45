"""What one forward of fixed shape reads, as a single row of numbers.

The CPU writes a row (`FrameWriter`), one copy brings it to the device, and there views of it
become ids, positions and masks (`static_layout`), in ops that know the shape of the forward and
no number of the step. So a graph that was captured over them serves every step of its shape.

A forward may be wider than its widest tree and have more rows than are left: what is too much
repeats a root, sees what a root sees, and is seen by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.records import DraftTree, Queries
from selfspec.run.layout import Layout, Window, ancestors, in_window

__all__ = ["FramePlaces", "FrameShape", "FrameWriter", "static_layout"]

_WORD = 64  # nodes whose bits an int64 holds


class FrameShape(NamedTuple):
    """All that the shapes of a forward's inputs depend on."""

    rows: int
    width: int
    lead: tuple[int, ...]  # of the position ids, in front of their rows
    num_types: int  # of attention

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
        """How many numbers a frame has."""
        return sum(map(prod, self.fields()))


class _Fields(NamedTuple):
    """The parts of a frame."""

    ids: Any  # (R, W)
    depths: Any  # (R, W)
    bits: Any  # (R, W, words): the nodes that a node sees
    positions: Any  # (..., R): the position id of each row's root
    lengths: Any  # (R,): committed columns
    starts: Any  # (R,): the first column that counts
    firsts: Any  # (types,): the column that the first slot stands for
    front: Any  # (1,): the column where the trees begin


class FramePlaces(NamedTuple):
    """Where the rows of a forward stand, on the CPU."""

    lengths: Sequence[int]
    positions: NDArray[np.int64]  # (..., rows)
    starts: Sequence[int]
    firsts: Sequence[int]
    front: int


class FrameWriter:
    """Writes frames of one shape, each over the one before."""

    def __init__(self, shape: FrameShape) -> None:
        self._width = shape.width
        self.flat = torch.zeros(shape.size, dtype=torch.long)
        self._fields = _Fields(*(part.numpy() for part in _split(self.flat, shape)))
        self._fields.bits[..., 0] = 1  # rows that nobody fills see their root

    def write(self, trees: Sequence[DraftTree | Queries], places: FramePlaces) -> torch.Tensor:
        """The frame (size,) of some trees, to be sent before the next one is written."""
        fields, num_rows = self._fields, len(trees)
        for row, tree in enumerate(trees):
            num_nodes = len(tree.tokens)
            fields.ids[row, :num_nodes] = tree.tokens
            fields.ids[row, num_nodes:] = tree.tokens[0]
            fields.depths[row, :num_nodes] = tree.depths
            fields.depths[row, num_nodes:] = 0
            fields.bits[row] = _packed(ancestors([tree.parents], self._width)[0])
        fields.positions[..., :num_rows] = places.positions
        fields.lengths[:num_rows] = places.lengths
        fields.starts[:num_rows] = places.starts
        fields.firsts[:] = places.firsts
        fields.front[:] = places.front
        self._clear_from(num_rows)
        return self.flat

    def _clear_from(self, num_rows: int) -> None:
        """Rows that an earlier frame filled see no committed column any more."""
        self._fields.lengths[num_rows:] = 0
        self._fields.depths[num_rows:] = 0
        self._fields.bits[num_rows:] = 0
        self._fields.bits[num_rows:, :, 0] = 1


class StaticForward(NamedTuple):
    """The inputs of a forward, and where its keys and values go."""

    layout: Layout
    slots: dict[str, torch.Tensor]  # by attention type: (W,)
    front: torch.Tensor  # (): the column where the trees begin


def static_layout(
    flat: torch.Tensor,  # (size,)
    shape: FrameShape,
    *,
    windows: Mapping[str, Window],
    num_keys: Mapping[str, int],
    visible: torch.Tensor,  # (>= R, columns) bool: what counts of the prompt; the last one does
    dtype: torch.dtype,
) -> StaticForward:
    """What `layout.lay_out` makes of the same trees, with `num_keys` columns in each mask."""
    fields = _split(flat, shape)
    masker = _StaticMasker(fields, visible[: shape.rows], dtype)
    nodes = torch.arange(shape.width, device=flat.device)
    masks: dict[str, torch.Tensor | None] = {}
    slots: dict[str, torch.Tensor] = {}
    for place, (name, window) in enumerate(windows.items()):
        first = fields.firsts[place]
        masks[name] = masker.mask(window, first, num_keys[name])
        slots[name] = fields.front - first + nodes
    layout = Layout(fields.ids, fields.positions[..., None] + fields.depths, masks)
    return StaticForward(layout, slots, fields.front[0])


class _StaticMasker:
    """Builds the masks of one forward on its device, without a look at a number from the CPU."""

    def __init__(self, fields: _Fields, visible: torch.Tensor, dtype: torch.dtype) -> None:
        self._fields = fields
        self._visible = visible
        self._dtype = dtype
        self._query_columns = fields.lengths[:, None] + fields.depths  # (R, W)
        self._tree_sees = _unpacked(fields.bits)  # (R, W, W)

    def mask(self, window: Window, first: torch.Tensor, num_keys: int) -> torch.Tensor:
        """(R, 1, W, num_keys), 0 where a node may look."""
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
        """(R, columns): is there a token of the row in this column."""
        known = self._visible.index_select(1, columns.clamp(max=self._visible.shape[1] - 1))
        lengths: torch.Tensor = self._fields.lengths[:, None]
        return (columns < lengths) & known

    def _in_window(self, window: Window, keys: torch.Tensor) -> torch.Tensor:
        """(R, W, columns): is the key, by its column (R, columns), near enough."""
        starts = self._fields.starts[:, None, None]
        return in_window(window, keys[:, None], self._query_columns[:, :, None], starts)


def _split(flat: torch.Tensor, shape: FrameShape) -> _Fields:
    """Views of a frame's parts."""
    shapes = shape.fields()
    parts = torch.split(flat, [prod(part) for part in shapes])
    return _Fields(*(part.view(size) for part, size in zip(parts, shapes, strict=True)))


def _packed(sees: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(W, words): the rows of a matrix (W, W), a bit for each column."""
    width = sees.shape[-1]
    whole = np.pad(sees, ((0, 0), (0, -width % _WORD)))
    return np.packbits(whole, axis=-1, bitorder="little").view("<i8")


def _unpacked(bits: torch.Tensor) -> torch.Tensor:
    """(R, W, W) bool of (R, W, words)."""
    places = torch.arange(_WORD, device=bits.device)
    sees = (bits[..., None] >> places) & 1
    return sees.flatten(-2)[..., : bits.shape[1]].bool()
