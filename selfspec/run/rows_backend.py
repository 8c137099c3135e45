"""Trees of rows that come and go, over one block of slots that the rows share out.

All rows have the same number of columns, those of the one that may become the longest. When a row
leaves, the last one moves into its place, so the rows in use always lie side by side, as a forward
needs them. Where a new row needs more columns, the same block is divided anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from selfspec.compat.generation import KV
from selfspec.run.arena import Arena
from selfspec.run.backends import TreeBackend
from selfspec.run.columns import Columns
from selfspec.run.model import AttentionTypes, device_of

__all__ = ["RowsBackend", "RowsKV", "bytes_per_token", "kv_bytes_per_token"]

# Columns are handed out in multiples of this where there is room, so that rows of about the same
# length do not divide the block anew each time.
_MULTIPLE = 64
_LARGE = 1 << 20  # Without a limit, arenas are split as those of this many tokens.


def bytes_per_token(cache: Cache) -> tuple[int, int]:
    """What one token takes in a cache that holds one row: in all layers, and in the largest part.

    A part is the keys or the values of a layer.
    """
    held = [getattr(layer, name) for layer in cache.layers for name in ("keys", "values")]
    parts = [each[:, :, :1].numel() * each.element_size() for each in held]
    return sum(parts), max(parts)


class RowsKV(Columns):
    """Slots for at most `max_rows` rows, and for `max_tokens` tokens of all rows together.

    `cache` shows what a token takes: it holds a single one, which is forgotten. Windowed layers
    keep all columns, since a row that comes may be shorter than those that are there. With a limit,
    a row comes only where there is room for all that it may need. Without one, the block grows with
    the rows and their texts, to at most what they may need. Nobody else gets the cache.
    """

    def __init__(
        self,
        cache: Cache,
        attention_types: Sequence[str],
        *,
        max_rows: int,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(cache, attention_types, num_rows=0)
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        parts = self._parts(max_tokens or _LARGE)
        self._arenas = [Arena(key, self._new_slots(key, len(m), 1), m) for key, m in parts]
        self._blocks = [arena.slots.new_empty(len(arena.members), 0) for arena in self._arenas]
        self._views = [arena.slots[:, :0] for arena in self._arenas]  # (members, rows, H, C, D)
        self._shape = (0, 0)  # How many rows, and how many columns of each, have room.
        self._needs: list[int] = []  # How many columns each row may come to need.
        self.front = 0  # The one token is forgotten.
        cache.layers = self._layers

    @property
    def needs(self) -> list[int]:
        """How many columns each row may come to need."""
        return list(self._needs)

    @property
    def nbytes(self) -> int:
        """What the block takes."""
        return sum(block.numel() * block.element_size() for block in self._blocks)

    @property
    def bytes_in_use(self) -> int:
        """What the tokens of all rows take, without the slots that are still empty."""
        shapes = [(arena, *arena.geometry.shape[1:]) for arena in self._arenas]
        each = sum(
            len(arena.members) * heads * dim * arena.geometry.dtype.itemsize
            for arena, heads, dim in shapes
        )
        return each * sum(self.lengths)

    def fits(self, needs: Sequence[int]) -> bool:
        """Can rows be here together that may come to need this many columns each?"""
        if len(needs) > self._max_rows:
            return False
        return self._max_tokens is None or len(needs) * max(needs) <= self._max_tokens

    def add_row(self, cache: Cache, need: int) -> None:
        """Moves a prompt's KV (1, H, L, D) behind the last row, and empties the cache."""
        length, row = int(cache.get_seq_length()), len(self.lengths)
        self._make_room(row + 1, max(self.front, length), max([*self._needs, need]))
        self._needs.append(need)
        self._starts.append(length)
        self.lengths.append(length)
        for arena, view in zip(self._arenas, self._views, strict=True):
            for member, (index, name) in enumerate(arena.members):
                layer, slots = cache.layers[index], view[member, row]
                _fill(slots, getattr(layer, name)[0], length)
                setattr(layer, name, slots.new_empty(0))
        self._show()

    def reserve(self, width: int) -> None:
        """Makes room for a tree of `width` nodes, if there is none yet."""
        if self._make_room(len(self.lengths), self.front + width, max(self._needs)):
            self._show()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Moves rows to the front of the block, in this order; none may move up."""
        for view in self._views:
            for target, row in enumerate(rows):
                if target != row:
                    view[:, target] = view[:, row]
        for held in (self.lengths, self._starts, self._needs):
            held[:] = [held[row] for row in rows]
        self._show()

    def _show(self) -> None:
        """Lets the layers see the rows that are in use."""
        self.front = max(self.lengths, default=0)
        for arena, view in zip(self._arenas, self._views, strict=True):
            arena.slots = view[:, : len(self.lengths)]
            self._connect(arena)

    def _make_room(self, num_rows: int, num_columns: int, most: int) -> bool:
        """Divides the block anew where so many rows or columns have no room; was that the case?

        `most` is how many columns a row may come to need.
        """
        rows, columns = self._shape
        wanted = num_columns if self._max_tokens is None else most
        if num_rows <= rows and wanted <= columns:
            return False
        if self._max_tokens is None:
            rows = rows if num_rows <= rows else min(max(2 * rows, num_rows), self._max_rows)
            columns = _rounded_up(max(min(2 * num_columns, most), num_columns))
        else:
            columns = _rounded_up(most)
            if not self.fits([columns] * num_rows):
                columns = most
            rows = min(self._max_rows, self._max_tokens // columns)
        self._divide(rows, columns)
        return True

    def _divide(self, num_rows: int, columns: int) -> None:
        """Divides the block, or a larger one, into rows of some columns; their contents stay.

        Takes as much memory on top as the keys or values of one layer, for a moment, or as one
        arena if the block grows.
        """
        self._shape = (0, 0)  # If memory runs out on the way, the next row divides all of it anew.
        for index, view in enumerate(self._views):
            block, new = self._block(index, num_rows, columns)
            for member in range(len(block)):
                held = view[member, : len(self.lengths), :, : self.front].clone()
                slots = new[member, : len(held)]
                slots[:, :, : self.front] = held
                slots[:, :, self.front :] = 0
            self._blocks[index], self._views[index] = block, new
        self._shape = (num_rows, columns)

    def _block(self, index: int, num_rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An arena's block for all tokens, the old one if that will do, and its new view."""
        block, geometry = self._blocks[index], self._arenas[index].geometry
        num_tokens = self._max_tokens or num_rows * columns
        _, heads, dim = geometry.shape
        if num_tokens * heads * dim > block.shape[1]:
            block = block.new_empty(len(block), num_tokens * heads * dim)
        used = block[:, : num_rows * heads * columns * dim]
        return block, used.view(len(block), num_rows, heads, columns, dim)


def _rounded_up(num_columns: int) -> int:
    return -(-num_columns // _MULTIPLE) * _MULTIPLE


def _fill(slots: torch.Tensor, held: torch.Tensor, length: int) -> None:
    """Writes a prompt's last columns where they belong, and zeros elsewhere.

    What an earlier row left could be NaN, and 0 times NaN is NaN, even for a hidden slot.
    """
    first = length - held.shape[1]
    slots[:, :first] = 0
    slots[:, first:length] = held
    slots[:, length:] = 0


class RowsBackend(TreeBackend):
    """A `TreeBackend` without rows at first, to which rows are added.

    `max_bytes` is what the keys and values may take, among them those of a prompt that is being
    read, which has one share of `max_rows + 1`, and the copy of a part that is made when rows are
    divided anew. None: there is no limit.
    """

    kv: RowsKV

    def __init__(
        self, model: Any, attention: AttentionTypes, *, max_rows: int, max_bytes: int | None
    ) -> None:
        cache = _cache_of_one_token(model)
        self.max_tokens = self.max_prompt = None
        if max_bytes is not None:
            whole, part = bytes_per_token(cache)
            self.max_prompt = max_bytes // (whole * (max_rows + 1) + part * max_rows)
            self.max_tokens = self.max_prompt * max_rows
        kv = RowsKV(cache, attention.by_layer, max_rows=max_rows, max_tokens=self.max_tokens)
        positions = torch.zeros(0, 1, dtype=torch.long, device="cpu")
        super().__init__(model, cache, attention, positions, None, kv=kv)

    def add_row(self, cache: Cache, next_positions: torch.Tensor, need: int) -> None:
        """Takes in a prompt that was read, with the position ids (..., 1, 1) of its next token.

        `need` is how many columns its row may come to need, the widest tree's among them.
        """
        self.kv.add_row(cache, need)
        positions = next_positions[..., 0].cpu().numpy()
        if self._positions.ndim != positions.ndim:  # These are the first ones.
            self._positions = positions[..., :0]
        self._positions = np.concatenate([self._positions, positions], axis=-1)
        self._starts.append(0)


def kv_bytes_per_token(model: Any) -> int:
    """What the keys and values of one token take; reads a token to find out."""
    return bytes_per_token(_cache_of_one_token(model))[0]


def _cache_of_one_token(model: Any) -> DynamicCache:
    """Shows the shape, the dtype and the device of each layer's keys and values."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{KV: cache})
    return cache
