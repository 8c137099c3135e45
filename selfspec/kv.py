"""KV layers that append a tree and keep a path, in place of transformers' own while drafting.

Every call that depends on transformers' cache API is here. The prompt's forward fills the stock
cache as always; `TreeKV` then moves its contents into preallocated arenas, drafting works on
those, and `release` hands the stock layers back as if stock decoding had filled them.

All layers of one attention type and one geometry share an arena, so that keeping a path costs
two copies an arena and not two a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

__all__ = ["TreeKV", "can_hold_trees", "foreign_layer"]

_Geometry = tuple[str, tuple[int, ...], torch.dtype, torch.device]


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


@dataclass
class _Arena:
    """Slots for the keys or values of several layers of one geometry."""

    attention_type: str
    slots: torch.Tensor  # (members, B, H, capacity, D)
    members: list[tuple[TreeLayer, str]] = field(default_factory=list)


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of its arenas; writes where its `TreeKV` says."""

    is_sliding = False
    is_croppable = False

    def __init__(self, kv: TreeKV, stock: CacheLayerMixin, attention_type: str) -> None:
        super().__init__()
        self._kv = kv
        self.stock = stock
        self.attention_type = attention_type
        self.is_initialized = True
        self.stores: dict[str, torch.Tensor] = {}  # "keys", "values" -> (B, H, capacity, D)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the arenas exist before the layer is used."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends behind the front and returns everything up to there, without copying it."""
        self.keys = self._append("keys", key_states)
        self.values = self._append("values", value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys and first column of the next forward."""
        first_column = self._kv.first_columns[self.attention_type]
        return self._kv.front - first_column + query_length, first_column

    def get_seq_length(self) -> int:
        """Columns in front of the next tree."""
        return self._kv.front

    def get_max_length(self) -> int:
        """No maximum: arenas grow."""
        return -1

    def _append(self, name: str, states: torch.Tensor) -> torch.Tensor:
        start = self._kv.front - self._kv.first_columns[self.attention_type]
        end = start + states.shape[-2]
        store = self.stores[name]
        store[:, :, start:end] = states
        return store[:, :, :end]


class TreeKV:
    """The committed KV of a batch, with room behind it for one tree a row.

    `lengths` are the committed columns of each row, `front` the column where trees are appended:
    the longest row's length. `attention_types` names each layer's type.
    """

    def __init__(
        self,
        cache: Cache,
        attention_types: Sequence[str],
        window_sizes: dict[str, int],
        *,
        num_rows: int,
        room: int,
    ) -> None:
        self._cache = cache
        self._window_sizes = window_sizes  # by attention type; 0: sees everything
        self.front = int(cache.get_seq_length())
        self.lengths = [self.front] * num_rows
        self.first_columns = dict.fromkeys(attention_types, 0)
        self._stock_layers = list(cache.layers)
        layers = [
            TreeLayer(self, stock, name)
            for stock, name in zip(cache.layers, attention_types, strict=True)
        ]
        self._arenas = self._adopt(layers, room)
        cache.layers = layers

    @property
    def dtype(self) -> torch.dtype:
        """The keys' dtype, which masks must share."""
        return self._arenas[0].slots.dtype

    def reserve(self, width: int) -> None:
        """Makes room for a tree of `width` nodes, doubling where it lacks."""
        for arena in self._arenas:
            first_column = self.first_columns[arena.attention_type]
            if self.front + width - first_column > arena.slots.shape[3]:
                self._grow(arena.attention_type, width)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path of nodes; the rest of the tree is forgotten.

        Costs nothing where a path is already in place: the first nodes of a tree often are.
        """
        for row, path in enumerate(paths):
            length = self.lengths[row]
            if any(self.front + node != length + i for i, node in enumerate(path)):
                self._move(row, length, path)
            self.lengths[row] = length + len(path)
        self.front = max(self.lengths)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops the other rows, with one copy of what is kept."""
        index = list(rows)
        for arena in self._arenas:
            arena.slots = arena.slots[:, index]
            _hand_out(arena)
        self.lengths = [self.lengths[row] for row in index]
        self.front = max(self.lengths)

    def release(self) -> None:
        """Gives the cache its stock layers back, filled to the shortest row's committed length.

        Rows only differ in length where nobody is handed the cache, or after an error.
        """
        for arena in self._arenas:
            self._fill_stock(arena, min(self.lengths))
        self._cache.layers = self._stock_layers

    def _adopt(self, layers: Sequence[TreeLayer], room: int) -> list[_Arena]:
        groups: dict[_Geometry, list[tuple[TreeLayer, str]]] = {}
        for layer in layers:
            for name in ("keys", "values"):
                held: torch.Tensor = getattr(layer.stock, name)
                shape = (*held.shape[:2], held.shape[3])
                key = (layer.attention_type, shape, held.dtype, held.device)
                groups.setdefault(key, []).append((layer, name))
                self.first_columns[layer.attention_type] = self.front - held.shape[2]
        # all memory is taken before anything moves: running out of it leaves the cache whole
        arenas = [self._new_arena(key, members, room) for key, members in groups.items()]
        for arena in arenas:
            self._fill_arena(arena)
        return arenas

    def _new_arena(self, key: _Geometry, members: list[tuple[TreeLayer, str]], room: int) -> _Arena:
        attention_type, (rows, heads, dim), dtype, device = key
        held = self.front - self.first_columns[attention_type]
        # zeros, since a hidden slot's weight is 0 and 0 times what an empty tensor holds may be NaN
        slots = torch.zeros(len(members), rows, heads, held + room, dim, dtype=dtype, device=device)
        return _Arena(attention_type, slots, members)

    def _fill_arena(self, arena: _Arena) -> None:
        held = self.front - self.first_columns[arena.attention_type]
        for index, (layer, name) in enumerate(arena.members):
            arena.slots[index, :, :, :held] = getattr(layer.stock, name)
            # frees the stock tensor as we go, so that the prompt's KV is soon held once
            setattr(layer.stock, name, arena.slots.new_empty(0))
        _hand_out(arena)

    def _move(self, row: int, length: int, path: Sequence[int]) -> None:
        for arena in self._arenas:
            first_column = self.first_columns[arena.attention_type]
            here = self.front - first_column
            source = torch.tensor([here + node for node in path], device=arena.slots.device)
            slots = arena.slots[:, row]  # (members, H, capacity, D)
            start = length - first_column
            slots[:, :, start : start + len(path)] = slots.index_select(2, source)

    def _grow(self, attention_type: str, width: int) -> None:
        """Doubles the arenas of one type; windowed ones first drop what nobody sees any more."""
        old_first = self.first_columns[attention_type]
        size = self._window_sizes.get(attention_type, 0)
        first = max(old_first, min(self.lengths) - size + 1) if size else old_first
        held = self.front - first
        for arena in self._arenas:
            if arena.attention_type != attention_type:
                continue
            old = arena.slots
            capacity = max(2 * held, held + width)
            arena.slots = old.new_zeros(*old.shape[:3], capacity, old.shape[4])
            start = first - old_first
            arena.slots[:, :, :, :held] = old[:, :, :, start : start + held]
            _hand_out(arena)
        self.first_columns[attention_type] = first

    def _fill_stock(self, arena: _Arena, length: int) -> None:
        end = length - self.first_columns[arena.attention_type]
        for index, (layer, name) in enumerate(arena.members):
            stock = layer.stock
            start = 0
            if isinstance(stock, DynamicSlidingWindowLayer):
                start = max(end - stock.sliding_window + 1, 0)
                stock.cumulative_length = length
            setattr(stock, name, arena.slots[index, :, :, start:end])


def _hand_out(arena: _Arena) -> None:
    """Tells each layer where its keys or values are now."""
    for index, (layer, name) in enumerate(arena.members):
        layer.stores[name] = arena.slots[index]
