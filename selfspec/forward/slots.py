"""Preallocated slots for keys and values: one large tensor for several layers that are alike.

So keeping a path takes a few copies for every such tensor, not for every layer. Knows columns,
slots and transformers' cache layers; not which rows there are, nor how many slots they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from selfspec.forward.sizes import Size
from selfspec.machine.device import upload

LARGE = 1 << 20  # Rows that come and go are taken to have this many tokens together.
_SMALL = 16 << 20  # Larger slots are split into parts of this many bytes, filled one by one.
_MAX_PARTS = 12  # A part needs a few more copies in every step.
_FEW_MOVES = 3  # Up to this many single copies cost less than one copy by index.

ColumnMove = tuple[int, int, int]  # row, column from, column to
Member = tuple[int, str]  # a layer's index, and "keys" or "values"


class Format(NamedTuple):
    """What all keys and values in one tensor have in common."""

    attention_type: str
    num_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """What one column of one member takes."""
        return self.num_heads * self.dim * self.dtype.itemsize


class Slots:
    """One tensor with slots for the keys or the values of some layers, its members.

    A slot holds one column of the text, and the first slot the column `first`. With a `window`,
    no query sees further back, and older columns may be dropped.
    """

    def __init__(self, format: Format, members: Sequence[Member]) -> None:
        self.format = format
        self.members = members
        self.first = self.window = 0
        self.tensor = new_slots(format, len(members), 0, 0)  # (members, rows, H, capacity, D)

    @property
    def attention_type(self) -> str:
        return self.format.attention_type

    @property
    def size(self) -> Size:
        return Size(self.tensor.shape[1], self.tensor.shape[3], self.first)

    @property
    def column_bytes(self) -> int:
        """What one column of one row takes."""
        return len(self.members) * self.format.num_bytes

    def begin(self, layer: CacheLayerMixin, length: int, window: int) -> None:
        """Is to hold what a layer of transformers' cache does of a text of some length."""
        is_short = window and isinstance(layer, DynamicSlidingWindowLayer)
        self.window = window if is_short else 0
        self.first = length - layer.keys.shape[2] if is_short else 0

    def num_in(self, layers: Sequence[CacheLayerMixin]) -> int:
        """How many columns of a text belong here, of those that transformers' layers hold."""
        index, name = self.members[0]
        columns: torch.Tensor = getattr(layers[index], name)
        return columns.shape[2]

    def resize(self, size: Size, num_rows: int) -> None:
        """Moves what the first rows have into a new tensor, or drops columns if the size stays."""
        columns = self.tensor[:, :num_rows, :, size.first - self.first :]
        if size[:2] == self.size[:2]:
            self.tensor[:, :num_rows, :, : columns.shape[3]] = columns.clone()
        else:
            columns = columns[..., : size.columns, :]
            if not num_rows:  # What nobody uses is freed before there is a new tensor.
                columns = self.tensor = columns[:, :, :, :0].clone()
            new = new_slots(self.format, len(self.members), size.rows, size.columns)
            new[:, :num_rows, :, : columns.shape[3]] = columns
            self.tensor = new
        self.first = size.first

    def fill(
        self, row: int, layers: Sequence[CacheLayerMixin], length: int, *, are_new: bool
    ) -> None:
        """Moves the last columns of a text of some length out of their layers, from a row on.

        Each of their tensors is freed at once, so that a text is not there twice for long. Slots
        that are not new are emptied around the columns, since an earlier row may have left a NaN.
        Not before: the columns may be views of these slots, if an earlier try broke off.
        """
        for member, (index, name) in enumerate(self.members):
            columns: torch.Tensor = getattr(layers[index], name)
            end = length - self.first
            start = end - columns.shape[2]
            slots = self.tensor[member, row : row + len(columns)]
            slots[:, :, start:end] = columns
            if not are_new:
                slots[:, :, :start] = 0
                slots[:, :, end:] = 0
            setattr(layers[index], name, columns.new_empty(0))

    def give_back(
        self, layers: Sequence[CacheLayerMixin], rows: slice, length: int, *, copies: bool
    ) -> None:
        """Lets transformers' layers that were emptied hold some rows' first `length` columns."""
        for member, (index, name) in enumerate(self.members):
            theirs, start, end = layers[index], 0, length - self.first
            if getattr(theirs, name).numel():  # Not moved yet.
                continue
            if isinstance(theirs, DynamicSlidingWindowLayer):
                start = max(end - theirs.sliding_window + 1, 0)
                theirs.cumulative_length = length
            columns = self.tensor[member, rows, :, start:end]
            setattr(theirs, name, columns.clone() if copies else columns)


def new_slots(format: Format, num_members: int, num_rows: int, capacity: int) -> torch.Tensor:
    """Slots full of zeros: a hidden slot has weight 0, and 0 times old memory may be NaN.

    They are not made in inference mode, since later calls could not write to them outside of it. On
    a CPU they take neither memory nor time before they are written to: there may be many rows to
    come, and torch would write each of their zeros.
    """
    shape = (num_members, num_rows, format.num_heads, capacity, format.dim)
    with torch.inference_mode(False):
        if format.device.type == "cpu" and (num_bytes := prod(shape) * format.dtype.itemsize):
            data = torch.from_numpy(np.zeros(num_bytes, np.uint8))
            return data.view(format.dtype).view(shape)
        return torch.zeros(shape, dtype=format.dtype, device=format.device)


def members_in(cache: Cache, attention_types: Sequence[str | None]) -> dict[Format, list[Member]]:
    """The members of each format among the layers of a cache that holds something."""
    members: dict[Format, list[Member]] = {}
    for index, (layer, name) in enumerate(zip(cache.layers, attention_types, strict=True)):
        if name is None:
            continue
        for member in ("keys", "values"):
            columns: torch.Tensor = getattr(layer, member)
            _, num_heads, _, dim = columns.shape
            format = Format(name, num_heads, dim, columns.dtype, columns.device)
            members.setdefault(format, []).append((index, member))
    return members


def split(all_members: Mapping[Format, list[Member]], num_tokens: int) -> list[Slots]:
    """Slots for the members of each format, in several parts if they are large.

    While slots are filled or enlarged, only one part needs its memory twice.
    """
    parts = []
    for format, members in all_members.items():
        num_bytes = len(members) * format.num_bytes * num_tokens
        share = max(len(members) // min(-(-num_bytes // _SMALL), _MAX_PARTS), 1)
        starts = range(0, len(members), share)
        parts += [Slots(format, members[start : start + share]) for start in starts]
    return parts


def move_columns(parts: Iterable[Slots], moves: Sequence[ColumnMove]) -> None:
    """Copies columns of all members, in an order in which none is overwritten before it is read."""
    if len(moves) <= _FEW_MOVES:
        for part in parts:
            for row, source, target in moves:
                slots = part.tensor.select(1, row)  # (members, H, capacity, D)
                source_slot = slots.select(2, source - part.first)
                slots.select(2, target - part.first).copy_(source_slot)
        return
    table = torch.tensor(moves, device="cpu").T
    tables: dict[Any, torch.Tensor] = {}
    for part in parts:
        device = part.format.device
        if device not in tables:
            tables[device] = upload(table, device)
        rows, sources, targets = tables[device]
        slots = part.tensor.movedim((1, 3), (0, 1))  # (B, capacity, members, H, D)
        slots[rows, targets - part.first] = slots[rows, sources - part.first]
