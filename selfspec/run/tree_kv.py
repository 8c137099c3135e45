"""The KV of a batch while drafting: layers that append a tree and then keep one path of it.

This module, `columns` and `arena` hold all that depends on transformers' cache API. The prompt's
forward fills the stock cache as always. `TreeKV` then moves its contents into preallocated arenas,
on which drafting works, and `release` gives the stock layers back as if stock decoding had filled
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from selfspec.compat.generation import set_columns_seen
from selfspec.run.arena import Arena, ArenaLayer, Geometry, Member
from selfspec.run.columns import Columns

__all__ = ["TreeKV", "can_hold_trees", "foreign_layer"]


def foreign_layer(cache: Cache) -> str | None:
    """Names a layer to which no tree can be appended; None if there is none."""
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"a KV layer is a {type(layer).__name__}, which can't branch"
    return None


def can_hold_trees(cache: Cache) -> str | None:
    """Why drafting can't take over a cache that a prompt has filled; None if it can."""
    if not all(layer.is_initialized for layer in cache.layers):
        return "a KV layer holds nothing, as where layers share their keys"
    return foreign_layer(cache)


class TreeKV(Columns):
    """The committed KV of a batch, with room behind it for one tree per row.

    The arenas start with `room` free columns. `reach` is how many tokens the text can still gain,
    if that is known.
    """

    def __init__(
        self,
        cache: Cache,
        attention_types: Sequence[str],
        window_sizes: dict[str, int],
        *,
        num_rows: int,
        room: int,
        reach: int | None = None,
        layers: Sequence[ArenaLayer] | None = None,
    ) -> None:
        super().__init__(cache, attention_types, num_rows=num_rows, layers=layers)
        # Only sliding layers drop columns; the other stock layers keep all of them.
        self._window_sizes = {
            name: window_sizes[name]
            for layer, name in zip(cache.layers, attention_types, strict=True)
            if isinstance(layer, DynamicSlidingWindowLayer)
        }
        self._max_length = math.inf if reach is None else self.front + reach
        try:
            self._adopt(room)
        except BaseException:  # No memory, or an interrupt: the owner of the cache gets it back.
            for arena in self._arenas:
                self._fill_stock(arena, self.front)
            raise
        if layers is None:
            cache.layers = self._layers

    def reserve(self, width: int) -> None:
        """Makes room for a tree of `width` nodes; arenas that are too small are doubled."""
        for arena in self._arenas:
            first_column = self.first_columns[arena.attention_type]
            if self.front + width - first_column > arena.slots.shape[3]:
                self._make_room(arena.attention_type, width)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, with one copy of each arena."""
        index = list(rows)
        for arena in self._arenas:
            arena.slots = arena.slots[:, index]
            self._connect(arena)
        self._count_rows(index)

    def _count_rows(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self._starts = [self._starts[row] for row in rows]
        self.front = max(self.lengths)

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache its stock layers back, filled up to the shortest row's length.

        Rows differ in length only if the caller does not get the cache, or after an error. Filling
        costs nothing here, so it does not depend on who gets it.
        """
        for arena in self._arenas:
            self._fill_stock(arena, min(self.lengths))
        self._cache.layers = self._stock_layers

    def _adopt(self, room: int) -> None:
        """Moves what the stock layers hold into arenas, one part after the other.

        So only one part of the KV is ever held twice.
        """
        for key, members in self._parts(room):
            self._arenas.append(self._new_arena(key, members, room))
            self._fill_arena(self._arenas[-1])

    def _new_arena(self, key: Geometry, members: list[Member], room: int) -> Arena:
        held = self.front - self.first_columns[key.attention_type]
        return Arena(key, self._new_slots(key, len(members), held + room), members)

    def _fill_arena(self, arena: Arena) -> None:
        held = self.front - self.first_columns[arena.attention_type]
        for member, (index, name) in enumerate(arena.members):
            stock = self._stock_layers[index]
            arena.slots[member, :, :, :held] = getattr(stock, name)
            # This frees the stock tensor, so that the prompt's KV is not held twice for long.
            setattr(stock, name, arena.slots.new_empty(0))
        self._connect(arena)

    def _make_room(self, attention_type: str, width: int) -> None:
        """Doubles the arenas of one type, but to no more than the text can still need.

        Windowed ones first drop the columns that no query can see any more.
        """
        first = self._first_needed(attention_type)
        held = self.front - first
        most = int(min(2 * held, self._max_length - first + width))
        self._refill(attention_type, first, capacity=max(most, held + width))

    def _first_needed(self, attention_type: str) -> int:
        """The first column of a type that some row can still see."""
        old_first = self.first_columns[attention_type]
        size = self._window_sizes.get(attention_type, 0)
        return max(old_first, min(self.lengths) - size + 1) if size else old_first

    def _refill(self, attention_type: str, first: int, capacity: int) -> None:
        """Moves the columns from `first` on into arenas of another capacity.

        Where that drops columns, no arena is changed before there is memory for all of them.
        """
        start = first - self.first_columns[attention_type]
        arenas = [arena for arena in self._arenas if arena.attention_type == attention_type]
        moved = (self._moved(arena, start, self.front - first, capacity) for arena in arenas)
        for arena, slots in zip(arenas, list(moved) if start else moved, strict=True):
            arena.slots = slots
            self._connect(arena)
        self.first_columns[attention_type] = first

    def _moved(self, arena: Arena, start: int, held: int, capacity: int) -> torch.Tensor:
        slots = self._new_slots(_present_geometry(arena), len(arena.members), capacity)
        slots[:, :, :, :held] = arena.slots[:, :, :, start : start + held]
        return slots

    def _fill_stock(self, arena: Arena, length: int) -> None:
        end = length - self.first_columns[arena.attention_type]
        for member, (index, name) in enumerate(arena.members):
            stock = self._stock_layers[index]
            if getattr(stock, name).numel():  # It was not moved yet.
                continue
            start = 0
            if isinstance(stock, DynamicSlidingWindowLayer):
                start = max(end - stock.sliding_window + 1, 0)
                set_columns_seen(stock, length)
            setattr(stock, name, self._for_stock(arena.slots[member, :, :, start:end]))

    def _for_stock(self, held: torch.Tensor) -> torch.Tensor:
        """What a stock layer gets: the slots themselves, since nothing else uses them now."""
        return held


def _present_geometry(arena: Arena) -> Geometry:
    """The arena's geometry with the rows that are left."""
    _, heads, dim = arena.geometry.shape
    return arena.geometry._replace(shape=(arena.slots.shape[1], heads, dim))
