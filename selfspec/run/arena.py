"""Preallocated KV slots, and the cache layers that write into them.

All layers of one attention type and one geometry share an arena, which is one large tensor. So
keeping a path takes a few copies for each arena, not for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from selfspec.machine.device import upload

__all__ = ["Arena", "ArenaLayer", "ColumnMove", "Geometry", "Member", "move_columns"]

_FEW_MOVES = 3  # Up to this many single copies cost less than one copy by index.

ColumnMove = tuple[int, int, int]  # row, column from, column to
Member = tuple[int, str]  # a layer's index, and "keys" or "values"


class Geometry(NamedTuple):
    """What all keys and values in one arena have in common."""

    attention_type: str
    shape: tuple[int, int, int]  # (B, H, D)
    dtype: torch.dtype
    device: torch.device


@dataclass
class Arena:
    """One tensor with slots for the keys and values of several layers.

    A member is the keys or the values of one layer. A slot holds one column of the text, and the
    capacity is the number of slots.
    """

    geometry: Geometry
    slots: torch.Tensor  # (members, B, H, capacity, D)
    members: list[Member] = field(default_factory=list)

    @property
    def attention_type(self) -> str:
        """The attention type of its layers."""
        return self.geometry.attention_type


class ArenaLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of its arenas; a subclass decides which slots it writes."""

    is_sliding = False
    is_croppable = False
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, attention_type: str) -> None:
        super().__init__()
        self.attention_type = attention_type
        self.is_initialized = True
        self.stores: dict[str, torch.Tensor] = {}  # (B, H, capacity, D) for "keys" and "values"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing, since the arenas exist before the layer is used."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends behind the front and returns all slots up to there, without copying them."""
        keys = self.keys = self._append("keys", key_states)
        values = self.values = self._append("values", value_states)
        return keys, values

    def get_max_length(self) -> int:
        """-1, which stands for no maximum: arenas grow."""
        return -1

    def _append(self, name: str, states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def move_columns(
    arenas: Sequence[Arena], first_columns: Mapping[str, int], moves: Sequence[ColumnMove]
) -> None:
    """Copies columns in all arenas.

    `first_columns` has the column of each attention type's first slot. The moves must be in an
    order in which no column is overwritten before it is read.
    """
    if len(moves) <= _FEW_MOVES:
        _move_one_by_one(arenas, first_columns, moves)
    else:
        _move_by_index(arenas, first_columns, moves)


def _move_one_by_one(
    arenas: Sequence[Arena], first_columns: Mapping[str, int], moves: Sequence[ColumnMove]
) -> None:
    for arena in arenas:
        first_column = first_columns[arena.attention_type]
        for row, source, target in moves:
            slots = arena.slots.select(1, row)  # (members, H, capacity, D)
            source_slot = slots.select(2, source - first_column)
            slots.select(2, target - first_column).copy_(source_slot)


def _move_by_index(
    arenas: Sequence[Arena], first_columns: Mapping[str, int], moves: Sequence[ColumnMove]
) -> None:
    table = torch.tensor(moves, device="cpu").T
    devices = {arena.slots.device for arena in arenas}
    tables = {device: upload(table, device) for device in devices}
    for arena in arenas:
        rows, sources, targets = tables[arena.slots.device]
        first_column = first_columns[arena.attention_type]
        slots = arena.slots.movedim((1, 3), (0, 1))  # (B, capacity, members, H, D)
        slots[rows, targets - first_column] = slots[rows, sources - first_column]
