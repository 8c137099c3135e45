"""The committed columns of some rows, behind which trees are appended.

Knows arenas and columns; not where the slots come from, nor what becomes of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache

from selfspec.run.arena import Arena, ArenaLayer, ColumnMove, Geometry, Member, move_columns

__all__ = ["Columns", "TreeLayer"]

# A larger arena is split into parts of this many bytes, which are filled one after the other.
_SMALL_ARENA = 16 << 20
_MAX_PARTS = 12  # Each part needs a few more copies in each step.


class TreeLayer(ArenaLayer):
    """A layer that writes behind the front of its `Columns`."""

    def __init__(self, kv: Columns, attention_type: str) -> None:
        super().__init__(attention_type)
        # In a cycle of references, the KV of a call would outlive it until Python looks for cycles.
        self._kv: Columns = weakref.proxy(kv)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next forward sees, and the column of the first one."""
        first_column = self._kv.first_columns[self.attention_type]
        return self._kv.front - first_column + query_length, first_column

    def get_seq_length(self) -> int:
        """How many columns are in front of the next tree."""
        return self._kv.front

    def _append(self, name: str, states: torch.Tensor) -> torch.Tensor:
        start = self._kv.front - self._kv.first_columns[self.attention_type]
        width = states.shape[-2]
        store = self.stores[name]
        # Unlike an assignment to a slice, this raises an error where the slots end too early.
        store.narrow(2, start, width).copy_(states)
        return store[:, :, : start + width]


class Columns:
    """What `cache` holds, and room behind it; a subclass decides on the slots.

    `lengths` are the committed columns of each row. Trees are appended at the column `front`, which
    is the longest row's length. `attention_types` names each layer's type. Other `layers` than our
    own are those of a cache that the model is given in place of this one.
    """

    def __init__(
        self,
        cache: Cache,
        attention_types: Sequence[str],
        *,
        num_rows: int,
        layers: Sequence[ArenaLayer] | None = None,
    ) -> None:
        self._cache = cache
        self.front = int(cache.get_seq_length())
        self.lengths = [self.front] * num_rows
        self._starts = list(self.lengths)
        self.first_columns = dict.fromkeys(attention_types, 0)
        self._stock_layers = list(cache.layers)
        own = [TreeLayer(self, name) for name in attention_types]
        self._layers = own if layers is None else list(layers)
        self._arenas: list[Arena] = []

    @property
    def dtype(self) -> torch.dtype:
        """The keys' dtype, which the masks must have too."""
        return self._arenas[0].slots.dtype

    @property
    def num_committed(self) -> list[int]:
        """How many tokens were committed to each row since it came."""
        return [length - start for length, start in zip(self.lengths, self._starts, strict=True)]

    def reserve(self, width: int) -> None:
        """Makes room for a tree of `width` nodes, if there is none yet."""
        raise NotImplementedError

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these."""
        raise NotImplementedError

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache back to its owner, if that is somebody else."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path of nodes and forgets the rest of the tree.

        Costs nothing if the path already lies in the right slots, as a tree's first nodes do. What
        breaks off here leaves the columns of earlier steps as they were.
        """
        # The nodes of a path lie behind their targets, so none is overwritten before it is read.
        moves: list[ColumnMove] = []
        for row, path in enumerate(paths):
            targets = enumerate(path, start=self.lengths[row])
            moves += [(row, self.front + n, to) for to, n in targets if self.front + n != to]
        if moves:
            move_columns(self._arenas, self.first_columns, moves)
        self.lengths = [held + len(path) for held, path in zip(self.lengths, paths, strict=True)]
        self.front = max(self.lengths)

    def reopen(self) -> None:
        """Makes the last committed column of each row the root of its next tree."""
        self.lengths = [length - 1 for length in self.lengths]
        self.front -= 1

    @contextmanager
    def behind(self, num_nodes: int) -> Iterator[None]:
        """Inside, a tree goes on behind this many of its nodes, which were read before."""
        self.front += num_nodes
        try:
            yield
        finally:
            self.front -= num_nodes

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

    def _new_slots(self, key: Geometry, num_members: int, capacity: int) -> torch.Tensor:
        """Slots full of zeros: a hidden slot has weight 0, and 0 times old memory may be NaN."""
        rows, heads, dim = key.shape
        shape = (num_members, rows, heads, capacity, dim)
        return torch.zeros(shape, dtype=key.dtype, device=key.device)

    def _connect(self, arena: Arena) -> None:
        """Tells each layer where its keys or values are now."""
        for member, (index, name) in enumerate(arena.members):
            self._layers[index].stores[name] = arena.slots[member]
