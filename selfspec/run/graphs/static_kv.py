"""The committed KV of a batch in slots with fixed addresses, which outlive the calls.

A captured forward always reads and writes the same addresses and shapes. So the arenas outlive the
calls, each forward says in a tensor on the device which slots it writes, and attention gets keys in
one of a few lengths. `StaticKV` fills the arenas with one call's prompt and gives the stock cache
its KV back as copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from selfspec.run.arena import Arena, ArenaLayer, Geometry, Member
from selfspec.run.tree_kv import TreeKV

__all__ = ["Span", "StaticArenas", "StaticKV", "length_bucket"]

_MULTIPLE = 64  # Every capacity is a multiple of this.
_LEAST_LENGTH = 256


def length_bucket(length: int) -> int:
    """How many keys attention gets if it needs `length` of them.

    >>> [length_bucket(length) for length in (1, 256, 257, 3000)]
    [256, 256, 512, 4096]
    """
    return max(_LEAST_LENGTH, 1 << (length - 1).bit_length())


@dataclass
class Span:
    """What the current forward writes and sees in the arenas of one attention type."""

    slots: torch.Tensor  # (Q,): the slot of each node's keys and values
    front: torch.Tensor  # (): how many columns are in front of the tree
    num_keys: int


class StaticLayer(ArenaLayer):
    """A layer that writes the slots of its `Span`, and knows lengths only as tensors."""

    def __init__(self, attention_type: str, spans: dict[str, Span]) -> None:
        super().__init__(attention_type)
        self._spans = spans

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys a forward sees, and the first column of a mask of the model's own."""
        return self._spans[self.attention_type].num_keys, 0

    def get_seq_length(self) -> torch.Tensor:
        """How many columns are in front of the tree, as a tensor: a capture would keep a number."""
        return self._spans[self.attention_type].front

    def _append(self, name: str, states: torch.Tensor) -> torch.Tensor:
        span = self._spans[self.attention_type]
        store = self.stores[name][: states.shape[0]]
        store.index_copy_(2, span.slots, states)
        return store[:, :, : span.num_keys]


class StaticArenas:
    """Arenas and cache layers that serve one call after the other.

    The model is given `cache`. `generation` grows when slots get another address; captures of an
    earlier generation must not be replayed.
    """

    def __init__(self, attention_types: Sequence[str]) -> None:
        self.spans: dict[str, Span] = {}
        self.layers: list[ArenaLayer] = [StaticLayer(name, self.spans) for name in attention_types]
        self.cache = DynamicCache()
        self.cache.layers = self.layers
        self.generation = 0
        self._slots: dict[tuple[Geometry, int], torch.Tensor] = {}

    @property
    def num_rows(self) -> int:
        """How many rows the arenas have; a call may use fewer."""
        return min(slots.shape[1] for slots in self._slots.values())

    def slots(self, geometry: Geometry, num_members: int) -> torch.Tensor:
        """All slots of an arena, the rows that the call does not use included."""
        return self._slots[_key(geometry, num_members)]

    def take(self, geometry: Geometry, num_members: int, capacity: int) -> torch.Tensor:
        """Slots full of zeros, with at least the rows of `geometry` and `capacity` columns."""
        rows, heads, dim = geometry.shape
        key = _key(geometry, num_members)
        kept = self._slots.pop(key, None)  # If new ones are made, the old ones are freed first.
        if kept is not None and rows <= kept.shape[1] and capacity <= kept.shape[3]:
            self._slots[key] = kept.zero_()
            return kept
        if kept is not None:
            rows, capacity = _suiting_both(rows, capacity, kept.shape[1], kept.shape[3])
        del kept
        self.generation += 1
        shape = (num_members, rows, heads, capacity, dim)
        # Tensors made in inference mode could not be written to outside of it by a later call.
        with torch.inference_mode(False):
            self._slots[key] = torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)
        return self._slots[key]

    def rest(self) -> None:
        """Takes the slots from the layers after a call, so that only this object holds them."""
        for layer in self.layers:
            layer.stores.clear()
            layer.keys = layer.values = None


class StaticKV(TreeKV):
    """One call's KV in `StaticArenas`, with room behind the front for trees of `widest` nodes."""

    def __init__(
        self,
        cache: Cache,
        attention_types: Sequence[str],
        window_sizes: dict[str, int],
        arenas: StaticArenas,
        *,
        num_rows: int,
        room: int,
        widest: int,
        reach: int | None = None,
    ) -> None:
        self._static = arenas
        self._widest = widest
        sizes: Any = {"num_rows": num_rows, "room": room, "reach": reach}
        super().__init__(cache, attention_types, window_sizes, **sizes, layers=arenas.layers)

    def num_keys(self, width: int) -> dict[str, int]:
        """How many slots of each attention type a forward of `width` nodes sees."""
        bucket = length_bucket(max(self._need(name, width) for name in self.first_columns))
        return {name: min(bucket, self._capacity(name)) for name in self.first_columns}

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which move to the front of the same slots."""
        for arena in self._arenas:
            for target, row in enumerate(rows):
                if target != row:
                    arena.slots[:, target] = arena.slots[:, row]
            arena.slots = arena.slots[:, : len(rows)]
        self._count_rows(rows)

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache its stock layers back, filled with copies if anybody gets the cache."""
        if fills:
            super().release()
        else:
            self._cache.layers = self._stock_layers
        self._static.rest()

    def _adopt(self, room: int) -> None:
        """Takes all memory before it moves anything."""
        groups = self._members_by_geometry()
        self._arenas = [self._new_arena(key, members, room) for key, members in groups.items()]
        for arena in self._arenas:
            self._fill_arena(arena)

    def _new_arena(self, key: Geometry, members: list[Member], room: int) -> Arena:
        """A new arena; a windowed one needs no more than two windows, since it drops columns."""
        held = self.front - self.first_columns[key.attention_type]
        size = self._window_sizes.get(key.attention_type, 0)
        room = max(room, self._widest)
        if size:
            room = min(room, max(2 * (size + self._widest) - held, self._widest))
        return Arena(key, self._new_slots(key, len(members), held + room), members)

    def _new_slots(self, key: Geometry, num_members: int, capacity: int) -> torch.Tensor:
        capacity = -(-capacity // _MULTIPLE) * _MULTIPLE
        return self._static.take(key, num_members, capacity)[:, : key.shape[0]]

    def _connect(self, arena: Arena) -> None:
        """Gives layers all rows of the arena, since a forward may have more rows than are left."""
        slots = self._static.slots(arena.geometry, len(arena.members))
        for member, (index, name) in enumerate(arena.members):
            self._layers[index].stores[name] = slots[member]

    def _make_room(self, attention_type: str, width: int) -> None:
        """Drops old columns in the same slots; makes new arenas only if that is not enough."""
        first = self._first_needed(attention_type)
        start = first - self.first_columns[attention_type]
        if self._need(attention_type, width) - start > self._capacity(attention_type):
            super()._make_room(attention_type, width)
            return
        held = self.front - first
        for arena in self._arenas:
            if arena.attention_type == attention_type:
                kept = arena.slots[:, :, :, start : start + held].clone()
                arena.slots[:, :, :, :held] = kept
        self.first_columns[attention_type] = first

    def _need(self, attention_type: str, width: int) -> int:
        return self.front + width - self.first_columns[attention_type]

    def _capacity(self, attention_type: str) -> int:
        (capacity,) = {a.slots.shape[3] for a in self._arenas if a.attention_type == attention_type}
        return capacity

    def _for_stock(self, held: torch.Tensor) -> torch.Tensor:
        """A copy, since the next call will write into the slots."""
        return held.clone()


def _key(geometry: Geometry, num_members: int) -> tuple[Geometry, int]:
    """Tells arenas apart, but not by the number of their rows."""
    return geometry._replace(shape=(0, *geometry.shape[1:])), num_members


def _suiting_both(rows: int, capacity: int, old_rows: int, old_capacity: int) -> tuple[int, int]:
    """Sizes that suit this call and the last one, unless that takes over twice the memory."""
    both = max(rows, old_rows), max(capacity, old_capacity)
    if both[0] * both[1] <= 2 * max(rows * capacity, old_rows * old_capacity):
        return both
    return rows, capacity
