"""The KV of a batch while drafting: layers that append a tree and then keep one path of it.

This module and `arena` hold all that depends on transformers' cache API. The prompt's forward fills
the stock cache as always. `TreeKV` then moves its contents into preallocated arenas, on which
drafting works, and `release` gives the stock layers back as if stock decoding had filled them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from selfspec.run.arena import Arena, ArenaLayer, ColumnMove, Geometry, Member, move_columns

__all__ = ["TreeKV", "can_hold_trees", "foreign_layer"]

# A larger arena is split into parts of so many bytes, which are filled one after the other.
_SMALL_ARENA = 16 << 20
_MAX_PARTS = 12  # Each part needs a few more copies in each step.


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


class TreeLayer(ArenaLayer):
    """A layer that writes behind the front of its `TreeKV`."""

    def __init__(self, kv: TreeKV, attention_type: str) -> None:
        super().__init__(attention_type)
        # In a cycle of references, the KV of a call would outlive it until Python looks for cycles.
        self._kv: TreeKV = weakref.proxy(kv)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next forward sees, and the column of the first one."""
        first_column = self._kv.first_columns[self.attention_type]
        return self._kv.front - first_column + query_length, first_column

    def get_seq_length(self) -> int:
        """How many columns are in front of the next tree."""
        return self._kv.front

    def _append(self, name: str, states: torch.Tensor) -> torch.Tensor:
        start = self._kv.front - self._kv.first_columns[self.attention_type]
        end = start + states.shape[-2]
        store = self.stores[name]
        store[:, :, start:end] = states
        return store[:, :, :end]


class TreeKV:
    """The committed KV of a batch, with room behind it for one tree per row.

    `lengths` are the committed columns of each row. Trees are appended at the column `front`, which
    is the longest row's length. `attention_types` names each layer's type. The arenas start with
    `room` free columns. `reach` is how many tokens the text can still gain, if that is known.
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
    ) -> None:
        self._cache = cache
        # Only sliding layers drop columns; the other stock layers keep all of them.
        self._window_sizes = {
            name: window_sizes[name]
            for layer, name in zip(cache.layers, attention_types, strict=True)
            if isinstance(layer, DynamicSlidingWindowLayer)
        }
        self._start = self.front = int(cache.get_seq_length())
        self._max_length = math.inf if reach is None else self.front + reach
        self.lengths = [self.front] * num_rows
        self.first_columns = dict.fromkeys(attention_types, 0)
        self._stock_layers = list(cache.layers)
        self._layers = self._new_layers(attention_types)
        self._arenas = self._adopt(room)
        self._take_over()

    @property
    def dtype(self) -> torch.dtype:
        """The keys' dtype, which the masks must have too."""
        return self._arenas[0].slots.dtype

    @property
    def num_committed(self) -> list[int]:
        """How many tokens were committed to each row since the cache was taken over."""
        return [length - self._start for length in self.lengths]

    def reserve(self, width: int) -> None:
        """Makes room for a tree of `width` nodes; arenas that are too small are doubled."""
        for arena in self._arenas:
            first_column = self.first_columns[arena.attention_type]
            if self.front + width - first_column > arena.slots.shape[3]:
                self._make_room(arena.attention_type, width)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path of nodes and forgets the rest of the tree.

        Costs nothing if the path already lies in the right slots, as a tree's first nodes do.
        """
        # The nodes of a path lie behind their targets, so none is overwritten before it is read.
        moves: list[ColumnMove] = []
        for row, path in enumerate(paths):
            targets = enumerate(path, start=self.lengths[row])
            moves += [(row, self.front + n, to) for to, n in targets if self.front + n != to]
            self.lengths[row] += len(path)
        if moves:
            move_columns(self._arenas, self.first_columns, moves)
        self.front = max(self.lengths)

    def reopen(self) -> None:
        """Makes the last committed column of each row the root of its next tree."""
        self.lengths = [length - 1 for length in self.lengths]
        self.front -= 1

    @contextmanager
    def behind(self, num_nodes: int) -> Iterator[None]:
        """Inside, a tree goes on behind so many of its nodes, which were read before."""
        self.front += num_nodes
        try:
            yield
        finally:
            self.front -= num_nodes

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, with one copy of each arena."""
        index = list(rows)
        for arena in self._arenas:
            arena.slots = arena.slots[:, index]
            self._connect(arena)
        self._count_rows(index)

    def _count_rows(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self.front = max(self.lengths)

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache its stock layers back, filled up to the shortest row's length.

        Rows differ in length only if the caller does not get the cache, or after an error. Then
        the layers may as well stay empty, which is where `fills` is False.
        """
        for arena in self._arenas if fills else ():
            self._fill_stock(arena, min(self.lengths))
        self._cache.layers = self._stock_layers

    def _new_layers(self, attention_types: Sequence[str]) -> list[ArenaLayer]:
        return [TreeLayer(self, name) for name in attention_types]

    def _take_over(self) -> None:
        """Puts our layers into the cache, so that the model uses them from now on."""
        self._cache.layers = self._layers

    def _adopt(self, room: int) -> list[Arena]:
        """Moves what the stock layers hold into arenas, one part after the other.

        So only one part of the KV is ever held twice. If memory runs out, the parts that were
        moved go back into the stock layers.
        """
        arenas: list[Arena] = []
        try:
            for key, members in self._parts(room):
                arenas.append(self._new_arena(key, members, room))
                self._fill_arena(arenas[-1])
        except torch.OutOfMemoryError:
            for arena in arenas:
                self._fill_stock(arena, self.front)
            raise
        return arenas

    def _parts(self, room: int) -> list[tuple[Geometry, list[Member]]]:
        """The members of each arena: all of one geometry, or a share of them if they are large."""
        parts = []
        for key, members in self._members_by_geometry().items():
            num_columns = self.front - self.first_columns[key.attention_type] + room
            num_bytes = len(members) * math.prod(key.shape) * num_columns * key.dtype.itemsize
            num_parts = min(-(-num_bytes // _SMALL_ARENA), _MAX_PARTS)
            share = max(len(members) // num_parts, 1)
            starts = range(0, len(members), share)
            parts += [(key, members[start : start + share]) for start in starts]
        return parts

    def _members_by_geometry(self) -> dict[Geometry, list[Member]]:
        groups: dict[Geometry, list[Member]] = {}
        for index, (layer, stock) in enumerate(zip(self._layers, self._stock_layers, strict=True)):
            for name in ("keys", "values"):
                held: torch.Tensor = getattr(stock, name)
                rows, heads, num_columns, dim = held.shape
                key = Geometry(layer.attention_type, (rows, heads, dim), held.dtype, held.device)
                groups.setdefault(key, []).append((index, name))
                self.first_columns[layer.attention_type] = self.front - num_columns
        return groups

    def _new_arena(self, key: Geometry, members: list[Member], room: int) -> Arena:
        held = self.front - self.first_columns[key.attention_type]
        return Arena(key, self._new_slots(key, len(members), held + room), members)

    def _new_slots(self, key: Geometry, num_members: int, capacity: int) -> torch.Tensor:
        """Slots full of zeros: a hidden slot has weight 0, and 0 times old memory may be NaN."""
        rows, heads, dim = key.shape
        shape = (num_members, rows, heads, capacity, dim)
        return torch.zeros(shape, dtype=key.dtype, device=key.device)

    def _fill_arena(self, arena: Arena) -> None:
        held = self.front - self.first_columns[arena.attention_type]
        for member, (index, name) in enumerate(arena.members):
            stock = self._stock_layers[index]
            arena.slots[member, :, :, :held] = getattr(stock, name)
            # This frees the stock tensor, so that the prompt's KV is not held twice for long.
            setattr(stock, name, arena.slots.new_empty(0))
        self._connect(arena)

    def _connect(self, arena: Arena) -> None:
        """Tells each layer where its keys or values are now."""
        for member, (index, name) in enumerate(arena.members):
            self._layers[index].stores[name] = arena.slots[member]

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
        """Moves the columns from `first` on into arenas of another capacity."""
        start = first - self.first_columns[attention_type]
        held = self.front - first
        for arena in self._arenas:
            if arena.attention_type != attention_type:
                continue
            old = arena.slots[:, :, :, start : start + held]
            arena.slots = self._new_slots(_present_geometry(arena), len(arena.members), capacity)
            arena.slots[:, :, :, :held] = old
            self._connect(arena)
        self.first_columns[attention_type] = first

    def _fill_stock(self, arena: Arena, length: int) -> None:
        end = length - self.first_columns[arena.attention_type]
        for member, (index, name) in enumerate(arena.members):
            stock = self._stock_layers[index]
            start = 0
            if isinstance(stock, DynamicSlidingWindowLayer):
                start = max(end - stock.sliding_window + 1, 0)
                stock.cumulative_length = length
            setattr(stock, name, self._for_stock(arena.slots[member, :, :, start:end]))

    def _for_stock(self, held: torch.Tensor) -> torch.Tensor:
        """What a stock layer gets: the slots themselves, since nothing else uses them now."""
        return held


def _present_geometry(arena: Arena) -> Geometry:
    """The arena's geometry with the rows that are left."""
    _, heads, dim = arena.geometry.shape
    return arena.geometry._replace(shape=(arena.slots.shape[1], heads, dim))
