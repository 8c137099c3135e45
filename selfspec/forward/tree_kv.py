"""The keys and values of some rows while drafting, with room after them for trees.

This module and `slots` hold all that depends on transformers' cache API. A prompt's forward fills a
stock cache as always. `TreeKV.add` moves its contents into slots, on which drafting works, and
`release` gives them back as if stock decoding had filled the cache.

The same slots serve a batch that stays, rows that come and go, windows, and captured forwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from selfspec.forward.inputs import columns_reason
from selfspec.forward.layout import Layout
from selfspec.forward.model import AttentionTypes
from selfspec.forward.slots import Kind, KVLayer, Member, Slots, kinds_in, move_columns, split

__all__ = [
    "ENDLESS",
    "KVRow",
    "TreeKV",
    "bytes_per_token",
    "can_hold_trees",
    "foreign_layer",
    "length_bucket",
]

_MULTIPLE = 64  # Columns come in multiples of this where other rows or calls may use them, too.
_LEAST_LENGTH = 256
ENDLESS = 1 << 62  # As a number of columns that nobody knows.
_LARGE = 1 << 20  # Slots of rows that come and go are split as those of this many tokens.


@dataclass(eq=False)
class KVRow:
    """What is known of one row: its committed columns, and where its next token is."""

    length: int
    max_columns: int  # How many columns it may come to need.
    start: int = 0  # Its first column that counts.
    position: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((), np.int64))  # (...,)


def length_bucket(length: int) -> int:
    """How many keys a captured forward gets if it needs `length` of them.

    >>> [length_bucket(length) for length in (1, 256, 257, 3000)]
    [256, 256, 512, 4096]
    """
    return max(_LEAST_LENGTH, 1 << (length - 1).bit_length())


def foreign_layer(cache: Cache) -> str | None:
    """Names a layer to which no tree can be appended; None if there is none."""
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"a KV layer is a {type(layer).__name__}, which can't branch"
    return columns_reason(cache)


def can_hold_trees(cache: Cache, num_layers: int) -> str | None:
    """Why drafting can't take over a cache that some layers have filled; None if it can."""
    if len(cache.layers) != num_layers:
        return f"it keeps {len(cache.layers)} KV layers for {num_layers}, as where some run again"
    if not all(layer.is_initialized for layer in cache.layers):
        return "a KV layer holds nothing, as where layers share their keys"
    return foreign_layer(cache)


def bytes_per_token(cache: Cache) -> tuple[int, int]:
    """What one token takes: in all layers, and in the largest part that is ever held twice."""
    parts = split(kinds_in(cache, ["any"] * len(cache.layers)), _LARGE)
    sizes = [len(part.members) * part.kind.num_bytes for part in parts]
    return sum(sizes), max(sizes)


class TreeKV:
    """Committed columns of rows, with room after them for one tree per row.

    `rows` says how many columns each row has. Trees are appended at the column `front`, which
    is the longest row's length. The model is given `cache`. `first_columns` has the column of each
    attention type's first slot: windowed layers drop the columns that no query can see any more.

    With `max_rows`, rows come and go, and windowed layers keep all columns, since a row that comes
    may be shorter than those that are there. `max_tokens` limits the slots of all rows together;
    then a row comes only where there is room for all that it may need.

    With `keeps_slots`, slots have fixed addresses and outlive the calls, as captured forwards need
    them, and during a forward its `layout` says which slots it writes and sees. `generation` grows
    when slots get another address; captures of an earlier generation must not be replayed.
    """

    def __init__(
        self,
        attention: AttentionTypes,
        *,
        keeps_slots: bool = False,
        max_rows: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.rows: list[KVRow] = []
        self.front = 0
        self.first_columns = dict.fromkeys(attention.windows, 0)
        self.layout: Layout | None = None
        self.generation = 0
        self.cache = DynamicCache()
        self.cache.layers = [KVLayer(self, name) for name in attention.by_layer]
        self._attention = attention
        self._keeps_slots = keeps_slots
        self._max_rows = max_rows
        self.max_tokens = max_tokens
        self._first_row = 0  # Whose slots are those of the first one of `rows`.
        self._is_part = False  # Are there other rows, which `only` hides?
        self._stock: list[CacheLayerMixin] = []  # Those that get their contents back.
        self._kinds: dict[Kind, list[Member]] = {}
        self._parts: list[Slots] = []
        self._capacities: dict[str, int] = {}  # by attention type
        self._window_sizes: dict[str, int] = {}  # of the types that drop columns

    @property
    def lengths(self) -> list[int]:
        """The committed columns of each row."""
        return [row.length for row in self.rows]

    @property
    def all_max_columns(self) -> list[int]:
        """How many columns each row may come to need."""
        return [row.max_columns for row in self.rows]

    @property
    def comes_and_goes(self) -> bool:
        """Do rows come while others are there?"""
        return self._max_rows is not None

    @property
    def max_prompt(self) -> int | None:
        """How many tokens each row may have if all rows are there; None: there is no limit."""
        limit, rows = self.max_tokens, self._max_rows
        return None if limit is None or rows is None else limit // rows

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self._parts[0].kind.device

    @property
    def dtype(self) -> torch.dtype:
        """The keys' dtype, which the masks must have too."""
        return self._parts[0].kind.dtype

    @property
    def num_rows(self) -> int:
        """How many rows have slots; fewer may be in use."""
        return min((part.num_rows for part in self._parts), default=0)

    @property
    def nbytes(self) -> int:
        """What all slots take."""
        return sum(part.tensor.nbytes for part in self._parts)

    @property
    def bytes_in_use(self) -> int:
        """What the tokens of all rows take, without the slots that are still empty."""
        each = sum(len(part.members) * part.kind.num_bytes for part in self._parts)
        return each * sum(self.lengths)

    def fits(self, all_max_columns: Sequence[int]) -> bool:
        """Can rows be here together that may come to need this many columns each?"""
        if self._max_rows is not None and len(all_max_columns) > self._max_rows:
            return False
        return (
            self.max_tokens is None
            or len(all_max_columns) * max(all_max_columns) <= self.max_tokens
        )

    def num_keys(self, width: int) -> dict[str, int]:
        """How many slots of each attention type a captured forward of `width` nodes sees."""
        end, firsts = self.front + width, self.first_columns
        bucket = length_bucket(end - min(firsts.values()))
        return {name: min(bucket, self._capacities[name]) for name in firsts}

    def add(
        self,
        cache: Cache,
        num_rows: int = 1,
        *,
        max_columns: int = ENDLESS,
        columns_now: int,
        max_tree: int = 1,
    ) -> None:
        """Moves what a prompt has put into a stock cache to after the last row, and empties it.

        `max_columns` is how many columns each of its rows may come to need, trees of `max_tree`
        nodes among them, and `columns_now` how many after the prompt get slots at once. On any
        exception, the cache and the rows are unchanged.
        """
        row, length = len(self.rows), int(cache.get_seq_length())
        if not row:
            self._begin(cache, num_rows * (length + columns_now))
        layers, end = list(cache.layers), max(self.front, length)
        all_max_columns = [*self.all_max_columns, *[max_columns] * num_rows]
        try:
            for part in self._parts:
                if not self._make_room(
                    part, all_max_columns, end, self._room(part, length, columns_now, max_tree)
                ):
                    part.tensor[:, row : row + num_rows].zero_()  # An earlier row may leave a NaN.
                part.fill(row, layers, length)
        except BaseException:  # No memory, or an interrupt.
            for part in self._parts:
                rows = slice(row, row + num_rows)
                part.give_back(layers, rows, length, copies=self._keeps_slots)
            raise
        self.rows += [KVRow(length, max_columns) for _ in range(num_rows)]
        self.front = end
        self._stock = layers if self._max_rows is None else []
        for part in self._parts:
            self._connect(part)
        self._note_capacities()

    def reserve(self, width: int) -> None:
        """Makes room for a tree of `width` nodes, if there is none yet."""
        end, firsts = self.front + width, self.first_columns
        if all(end - firsts[name] <= capacity for name, capacity in self._capacities.items()):
            return
        for part in self._parts:
            try:
                self._make_room(part, self.all_max_columns, end, end - part.first)
            except RuntimeError:  # There may be memory for this tree, if not for later ones too.
                self._make_room(part, self.all_max_columns, end, 0)
            firsts[part.kind.attention_type] = part.first
        self._note_capacities()

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path of nodes and forgets the rest of the tree.

        Costs nothing if the path already lies in the right slots, as a tree's first nodes do. What
        breaks off here leaves the columns of earlier steps as they were.
        """
        # The nodes of a path lie after their targets, so none is overwritten before it is read.
        moves = []
        for index, (row, path) in enumerate(zip(self.rows, paths, strict=True), self._first_row):
            targets = enumerate(path, start=row.length)
            moves += [(index, self.front + n, to) for to, n in targets if self.front + n != to]
        if moves:
            move_columns(self._parts, moves)
        for row, path in zip(self.rows, paths, strict=True):
            row.length += len(path)
            row.position = row.position + len(path)
        self.front = max(self.lengths)

    def wipe(self, rows: Sequence[int]) -> None:
        """Zeros all slots after the committed columns of some rows.

        A hidden slot has weight 0, and 0 times a NaN that a draft has left is NaN.
        """
        for part, row in product(self._parts, rows):
            part.tensor[:, self._first_row + row, :, self.rows[row].length - part.first :] = 0

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which move to the front in this order; none may move back."""
        for part in self._parts:
            # A captured forward sees slots after the front too, where a row that left may have
            # left a NaN.
            end = part.capacity if self._keeps_slots else self.front - part.first
            for target, row in enumerate(rows):
                if target != row:
                    part.tensor[:, target, :, :end] = part.tensor[:, row, :, :end]
        self.rows = [self.rows[row] for row in rows]
        self.front = max(self.lengths, default=0)
        for part in self._parts:
            self._connect(part)

    @contextmanager
    def only(self, rows: slice) -> Iterator[None]:
        """Inside, these are all rows that a forward and `commit` know of.

        Their front is that of the longest of them, so that they need no more slots if another row
        does.
        """
        before = self.rows, self._first_row, self._is_part
        self._show(self.rows[rows], self._first_row + rows.indices(len(self.rows))[0], True)
        try:
            yield
        finally:
            self._show(*before)

    def _show(self, rows: list[KVRow], first_row: int, is_part: bool) -> None:
        self.rows, self._first_row, self._is_part = rows, first_row, is_part
        self.front = max(self.lengths)
        for part in self._parts:
            self._connect(part)

    def release(self, *, fills: bool = True) -> None:
        """Gives the stock cache its contents back, up to the shortest row's length.

        Rows differ in length only if nobody gets the cache, or after an error. Slots that are kept
        are copied, so with them the cache stays empty if nobody gets it: if `fills` is false.
        """
        if self._stock and (fills or not self._keeps_slots):
            rows, length = slice(0, len(self.rows)), min(self.lengths)
            for part in self._parts:
                part.give_back(self._stock, rows, length, copies=self._keeps_slots)
        self.clear()

    def clear(self) -> None:
        """Forgets all rows, and without `keeps_slots` the slots too."""
        self.rows, self._stock, self.front = [], [], 0
        self.layout = None
        if not self._keeps_slots:
            self._parts, self._kinds, self._capacities = [], {}, {}
        for layer in self.cache.layers:
            layer.stores.clear()
            layer.keys = layer.values = None

    def _begin(self, cache: Cache, num_tokens: int) -> None:
        """Slots of the right kinds for a first row; those of an earlier call, if they will do."""
        kinds = kinds_in(cache, self._attention.by_layer)
        if kinds != self._kinds:
            num_tokens = num_tokens if self._max_rows is None else _LARGE
            self._kinds = kinds
            self._parts = split(kinds, 1 if self._keeps_slots else num_tokens)
            self.generation += 1
        if self._max_rows is not None:
            return
        self._window_sizes = {}
        length = int(cache.get_seq_length())
        for part in self._parts:
            (index, member), name = part.members[0], part.kind.attention_type
            layer = cache.layers[index]
            part.first = self.first_columns[name] = length - getattr(layer, member).shape[2]
            # Only these stock layers drop columns; the others hold whatever was written.
            if isinstance(layer, DynamicSlidingWindowLayer):
                self._window_sizes[name] = self._attention.windows[name].size

    def _room(self, part: Slots, length: int, columns_now: int, max_tree: int) -> int:
        """Windowed slots need no more than two windows, since they drop columns."""
        size = self._window_sizes.get(part.kind.attention_type, 0)
        held = length - part.first
        return min(columns_now, max(2 * size - held, 0) + max_tree) if size else columns_now

    def _make_room(self, part: Slots, all_max_columns: Sequence[int], end: int, more: int) -> bool:
        """Makes room for these rows up to a column, and for `more` if they may come to need it.

        Returns whether it took another tensor.
        """
        if self.max_tokens is not None:
            end = max(end, max(all_max_columns))
        if len(all_max_columns) <= part.num_rows and end - part.first <= part.capacity:
            return False
        first, size = part.first, self._window_sizes.get(part.kind.attention_type, 0)
        if size and self.rows:
            first = max(first, min(self.lengths) - size + 1)
            if end - first + size // 2 <= part.capacity:  # The next time is not near.
                part.drop(first, self.front)
                return False
        columns = min(end - first + more, max(all_max_columns) - first)
        sizes = self._sizes(part, len(all_max_columns), max(columns, end - first))
        held = len(self.rows), self.front
        if self._is_part:  # What is hidden is held too.
            held = part.num_rows, part.first + part.capacity
        part.resize(*sizes, first, *held)
        self._connect(part)
        self.generation += 1
        return True

    def _sizes(self, part: Slots, num_rows: int, columns: int) -> tuple[int, int]:
        """How many rows and columns some slots get that need at least so many."""
        is_shared = self._keeps_slots or self._max_rows is not None
        rounded = -(-columns // _MULTIPLE) * _MULTIPLE if is_shared else columns
        if self.max_tokens is not None:
            columns = rounded if self.fits([rounded] * num_rows) else columns
            most = self.max_tokens // columns
            return most if self._max_rows is None else min(self._max_rows, most), columns
        rows = part.num_rows
        if num_rows > rows:
            rows = max(num_rows, min(2 * rows, self._max_rows or num_rows))
        if self._keeps_slots and not self.rows:
            return _suiting_both((num_rows, rounded), (part.num_rows, part.capacity))
        return rows, rounded

    def _connect(self, part: Slots) -> None:
        """Tells layers where their keys or values are now; those that they had can be freed.

        Kept slots show all rows, since a forward may have more rows than are left.
        """
        end = self._first_row + len(self.rows)
        rows = part.tensor if self._keeps_slots else part.tensor[:, self._first_row : end]
        for member, (index, name) in enumerate(part.members):
            layer = self.cache.layers[index]
            layer.stores[name] = rows[member]
            setattr(layer, name, None)

    def _note_capacities(self) -> None:
        """How many columns of each attention type have slots in all parts."""
        self._capacities = {}
        for part in self._parts:
            name, capacity = part.kind.attention_type, part.capacity
            self._capacities[name] = min(capacity, self._capacities.get(name, capacity))


def _suiting_both(sizes: tuple[int, int], old: tuple[int, int]) -> tuple[int, int]:
    """Sizes that suit this call and the last one, unless that takes over twice the memory."""
    both = max(sizes[0], old[0]), max(sizes[1], old[1])
    return both if math.prod(both) <= 2 * max(math.prod(sizes), math.prod(old)) else sizes
