"""KV layers that append a tree and keep a path, in place of transformers' own while drafting.

What depends on transformers' cache API is here and in `arena`. The prompt's forward fills the stock
cache as always; `TreeKV` then moves its contents into preallocated arenas, drafting works on
those, and `release` hands the stock layers back as if stock decoding had filled them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from selfspec.machine.device import upload
from selfspec.run.arena import Arena, ArenaLayer, Geometry, Member

__all__ = ["TreeKV", "can_hold_trees", "foreign_layer"]

_SMALL_ARENA = 64 << 20  # bytes; of more than that, parts are moved into arenas one at a time
_NUM_PARTS = 12  # each is a few copies more a step
_FEW_MOVES = 3  # that many copies cost less than one by index

_Move = tuple[int, int, int]  # row, column from, column to


def foreign_layer(cache: Cache) -> str | None:
    """Names a layer of a kind that no tree can be appended to; None where there is none."""
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"a KV layer is a {type(layer).__name__}, which can't branch"
    return None


def can_hold_trees(cache: Cache) -> str | None:
    """Why drafting can't take over the cache that a prompt has filled; None where it can."""
    if not all(layer.is_initialized for layer in cache.layers):
        return "a KV layer holds nothing, as where layers share their keys"
    return foreign_layer(cache)


class TreeLayer(ArenaLayer):
    """A layer that writes where its `TreeKV` says."""

    def __init__(self, kv: TreeKV, attention_type: str) -> None:
        super().__init__(attention_type)
        self._kv = kv

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys and first column of the next forward."""
        first_column = self._kv.first_columns[self.attention_type]
        return self._kv.front - first_column + query_length, first_column

    def get_seq_length(self) -> int:
        """Columns in front of the next tree."""
        return self._kv.front

    def _append(self, name: str, states: torch.Tensor) -> torch.Tensor:
        start = self._kv.front - self._kv.first_columns[self.attention_type]
        end = start + states.shape[-2]
        store = self.stores[name]
        store[:, :, start:end] = states
        return store[:, :, :end]


class TreeKV:
    """The committed KV of a batch, with room behind it for one tree a row.

    `lengths` are the committed columns of each row, `front` the column where trees are appended:
    the longest row's length. `attention_types` names each layer's type. `room` columns are there to
    start with; the text grows by at most `reach`, where that is known.
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
        self._window_sizes = {  # of the types that forget: bare stock layers never do
            name: window_sizes[name]
            for layer, name in zip(cache.layers, attention_types, strict=True)
            if isinstance(layer, DynamicSlidingWindowLayer)
        }
        self._start = self.front = int(cache.get_seq_length())
        self._longest = math.inf if reach is None else self.front + reach
        self.lengths = [self.front] * num_rows
        self.first_columns = dict.fromkeys(attention_types, 0)
        self._stock_layers = list(cache.layers)
        self._layers = self._new_layers(attention_types)
        self._arenas = self._adopt(room)
        self._take_over()

    @property
    def dtype(self) -> torch.dtype:
        """The keys' dtype, which masks must share."""
        return self._arenas[0].slots.dtype

    @property
    def num_moved(self) -> list[int]:
        """How many tokens were committed to each row since the cache was taken over."""
        return [length - self._start for length in self.lengths]

    def reserve(self, width: int) -> None:
        """Makes room for a tree of `width` nodes, doubling where it lacks."""
        for arena in self._arenas:
            first_column = self.first_columns[arena.attention_type]
            if self.front + width - first_column > arena.slots.shape[3]:
                self._make_room(arena.attention_type, width)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path of nodes; the rest of the tree is forgotten.

        Costs nothing where a path is already in place: the first nodes of a tree often are.
        """
        moves: list[_Move] = []
        for row, path in enumerate(paths):
            places = enumerate(path, start=self.lengths[row])
            moves += [(row, self.front + n, to) for to, n in places if self.front + n != to]
            self.lengths[row] += len(path)
        if moves:
            self._move(moves)
        self.front = max(self.lengths)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops the other rows, with one copy of what is kept."""
        index = list(rows)
        for arena in self._arenas:
            arena.slots = arena.slots[:, index]
            self._hand_out(arena)
        self._count_rows(index)

    def _count_rows(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self.front = max(self.lengths)

    def release(self) -> None:
        """Gives the cache its stock layers back, filled to the shortest row's committed length.

        Rows only differ in length where nobody is handed the cache, or after an error.
        """
        for arena in self._arenas:
            self._fill_stock(arena, min(self.lengths))
        self._cache.layers = self._stock_layers

    def _new_layers(self, attention_types: Sequence[str]) -> list[ArenaLayer]:
        return [TreeLayer(self, name) for name in attention_types]

    def _take_over(self) -> None:
        """From now on the model finds our layers in the cache."""
        self._cache.layers = self._layers

    def _adopt(self, room: int) -> list[Arena]:
        """Moves what the stock layers hold into arenas, part by part.

        So but a part of the KV is ever held twice. Where memory runs out, all that was moved is
        handed back.
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
        """The members of each arena: all of one geometry, or a share where that is much memory."""
        parts = []
        for key, members in self._members_by_geometry().items():
            num_columns = self.front - self.first_columns[key.attention_type] + room
            num_bytes = len(members) * math.prod(key.shape) * num_columns * key.dtype.itemsize
            share = len(members)
            if num_bytes > _SMALL_ARENA:
                share = max(share // _NUM_PARTS, 1)
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
        """Zeros, since a hidden slot's weight is 0, and 0 times what it held may be NaN."""
        rows, heads, dim = key.shape
        shape = (num_members, rows, heads, capacity, dim)
        return torch.zeros(shape, dtype=key.dtype, device=key.device)

    def _fill_arena(self, arena: Arena) -> None:
        held = self.front - self.first_columns[arena.attention_type]
        for member, (index, name) in enumerate(arena.members):
            stock = self._stock_layers[index]
            arena.slots[member, :, :, :held] = getattr(stock, name)
            # frees the stock tensor as we go, so that the prompt's KV is soon held once
            setattr(stock, name, arena.slots.new_empty(0))
        self._hand_out(arena)

    def _hand_out(self, arena: Arena) -> None:
        """Tells each layer where its keys or values are now."""
        for member, (index, name) in enumerate(arena.members):
            self._layers[index].stores[name] = arena.slots[member]

    def _move(self, moves: Sequence[_Move]) -> None:
        """Copies columns."""
        if len(moves) <= _FEW_MOVES:
            self._move_in_turn(moves)
        else:
            self._move_by_index(moves)

    def _move_in_turn(self, moves: Sequence[_Move]) -> None:
        """Copies one column after the other, in the order of a path.

        Its nodes are behind where they go to, so none is written over before it is read.
        """
        for arena in self._arenas:
            first_column = self.first_columns[arena.attention_type]
            for row, source, target in moves:
                slots = arena.slots.select(1, row)  # (members, H, capacity, D)
                source_slot = slots.select(2, source - first_column)
                slots.select(2, target - first_column).copy_(source_slot)

    def _move_by_index(self, moves: Sequence[_Move]) -> None:
        """Copies all columns at once."""
        table = torch.tensor(moves).T
        placed = {place: upload(table, place) for place in {a.slots.device for a in self._arenas}}
        for arena in self._arenas:
            rows, sources, targets = placed[arena.slots.device]
            first_column = self.first_columns[arena.attention_type]
            slots = arena.slots.movedim((1, 3), (0, 1))  # (B, capacity, members, H, D)
            slots[rows, targets - first_column] = slots[rows, sources - first_column]

    def _make_room(self, attention_type: str, width: int) -> None:
        """Doubles the arenas of one type, or makes them as long as the text can still become.

        Windowed ones first drop what nobody sees any more.
        """
        first = self._first_needed(attention_type)
        held = self.front - first
        most = int(min(2 * held, self._longest - first + width))
        self._refill(attention_type, first, capacity=max(most, held + width))

    def _first_needed(self, attention_type: str) -> int:
        """The first column of a type that some row still sees, or will."""
        old_first = self.first_columns[attention_type]
        size = self._window_sizes.get(attention_type, 0)
        return max(old_first, min(self.lengths) - size + 1) if size else old_first

    def _refill(self, attention_type: str, first: int, capacity: int) -> None:
        """Moves what is held from column `first` on into arenas of another capacity."""
        start = first - self.first_columns[attention_type]
        held = self.front - first
        for arena in self._arenas:
            if arena.attention_type != attention_type:
                continue
            old = arena.slots[:, :, :, start : start + held]
            arena.slots = self._new_slots(_of_rows(arena), len(arena.members), capacity)
            arena.slots[:, :, :, :held] = old
            self._hand_out(arena)
        self.first_columns[attention_type] = first

    def _fill_stock(self, arena: Arena, length: int) -> None:
        end = length - self.first_columns[arena.attention_type]
        for member, (index, name) in enumerate(arena.members):
            stock = self._stock_layers[index]
            start = 0
            if isinstance(stock, DynamicSlidingWindowLayer):
                start = max(end - stock.sliding_window + 1, 0)
                stock.cumulative_length = length
            setattr(stock, name, self._given_back(arena.slots[member, :, :, start:end]))

    def _given_back(self, held: torch.Tensor) -> torch.Tensor:
        """What a stock layer gets: the slots themselves, since nobody else needs them."""
        return held


def _of_rows(arena: Arena) -> Geometry:
    """The geometry of the rows that are still there."""
    _, heads, dim = arena.geometry.shape
    return arena.geometry._replace(shape=(arena.slots.shape[1], heads, dim))
