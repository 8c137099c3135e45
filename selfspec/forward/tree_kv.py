"""The keys and values of some rows while drafting, with room after them for trees.

This module and `slots` hold all that depends on transformers' cache API. A prompt's forward fills a
cache of transformers as always. `TreeKV.add` moves its contents into slots, on which drafting
works, and `release` gives them back as if plain decoding had filled the cache. A policy of `sizes`
says how many slots there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from selfspec.forward.columns import Columns, KVRow, TextKV
from selfspec.forward.layers import KVLayer, layers_for
from selfspec.forward.layout import TreePlacement
from selfspec.forward.model import AttentionTypes
from selfspec.forward.sizes import Need, Policy, length_bucket
from selfspec.forward.slots import (
    LARGE,
    Format,
    Member,
    Slots,
    members_in,
    move_columns,
    split,
)
from selfspec.forward.states.slots import States

_NO_FORWARD = TreePlacement((), 0, {})


class TreeKV:
    """Committed columns of rows, with room after them for one tree per row.

    A row knows its place among the slots and its number of columns. The model is given `cache`,
    whose layers look at `forward`, the one for which room was made last. `visible` says which
    columns of the prompt count, row by row; None if all do. `generation` grows when slots get
    another address; captures of an earlier generation must not be replayed.
    """

    def __init__(self, attention: AttentionTypes, policy: Policy) -> None:
        self.policy = policy
        self.rows: Sequence[KVRow] = ()  # In the order of their places.
        self.forward = _NO_FORWARD
        self.visible: torch.Tensor | None = None  # (B, P) bool
        self.states = States()
        self.cache = DynamicCache()
        self.cache.layers = layers_for(attention.by_layer, attention.states, self)
        self.attention = attention
        self._their_layers: list[CacheLayerMixin] = []  # The first rows came in these.
        self._members: dict[Format, list[Member]] = {}
        self._parts: list[Slots] = []
        self._generation = 0
        self._shown: slice | None = None  # The places that the layers show.
        self._end = 0  # No slot from this column on was written since rows came.

    @property
    def placement(self) -> tuple[torch.dtype, torch.device]:
        """Where the slots are, and of what dtype, which the masks must have too."""
        if not self._parts:
            return self.states.placement
        return self._parts[0].format.dtype, self._parts[0].format.device

    @property
    def generation(self) -> int:
        return self._generation + self.states.generation

    def reading_reason(self) -> str | None:
        """Why a copy of the model can't read drafts on these slots now; None if it can."""
        if self.policy.is_fixed:
            return "captured forwards have slots of a fixed shape"
        return None if self.visible is None else "the prompt has padding"

    @property
    def num_rows(self) -> int:
        """How many rows have slots; fewer may be in use."""
        return min((part.size.rows for part in self._parts), default=0)

    @property
    def num_columns(self) -> int:
        """How many columns a row has slots for."""
        return max((part.size.columns for part in self._parts), default=0)

    @property
    def nbytes(self) -> int:
        return sum(part.tensor.nbytes for part in self._parts) + self.states.nbytes

    @property
    def column_bytes(self) -> int:
        """What one column of one row takes."""
        return sum(part.column_bytes for part in self._parts)

    @property
    def tree_start(self) -> int:
        """How many columns the longest row has."""
        return max((row.num_columns for row in self.rows), default=0)

    def num_keys(self, width: int) -> dict[str, int]:
        """How many slots of each attention type a captured forward of `width` nodes sees."""
        firsts = self.forward.firsts
        longest = self.forward.tree_start + width - min(firsts.values(), default=0)
        num_keys = dict.fromkeys(firsts, length_bucket(longest))
        for part in self._parts:
            name = part.attention_type
            num_keys[name] = min(num_keys[name], part.size.columns)
        return num_keys

    def add(self, cache: Cache, rows: Sequence[KVRow], others: Sequence[KVRow] = ()) -> None:
        """Moves what a prompt has put into its cache to places after others', and empties that.

        On any exception, the cache and the other rows are unchanged.
        """
        first, length = len(others), rows[0].num_columns
        if not first:
            self._begin(cache, len(rows) * length)
        layers, everyone = cache.layers, [*others, *rows]
        firsts = {part.attention_type: length - part.num_in(layers) for part in self._parts}
        places = slice(first, first + len(rows))
        self.rows, tree_start = list(others), max(row.num_columns for row in everyone)
        self._shown = None  # States may get another address.
        try:
            for part in self._parts:
                are_new = self._make_room(part, everyone, tree_start)
                part.fill(first, layers, length, are_new=are_new)
            self.states.add(layers, first, max(self.num_rows, places.stop))
        except BaseException:  # No memory, or an interrupt.
            for part in self._parts:
                part.give_back(layers, places, length, copies=self.policy.is_fixed)
            raise
        for place, row in enumerate(rows, first):
            row.place, row.first_columns = place, firsts
        self.rows, self._their_layers, self._end = everyone, layers, max(self._end, tree_start)

    def reserve(
        self, rows: Sequence[KVRow], width: int, num_rows: int | None = None
    ) -> TreePlacement:
        """Makes room for trees of `width` nodes of some rows, which lie side by side.

        The layers show their places, and the next ones if a forward has surplus rows.
        """
        tree_start = max(row.num_columns for row in rows)
        end, firsts = tree_start + width, dict.fromkeys(self.attention.windows, 0)
        for part in self._parts:
            if end - part.first > part.size.columns:
                try:
                    self._make_room(part, rows, end)
                except RuntimeError:  # There may be memory for this tree, if not for later ones.
                    self._make_room(part, rows, end, most=end)
            firsts[part.attention_type] = part.first
        self.forward, self._end = TreePlacement(rows, tree_start, firsts), max(self._end, end)
        places = slice(rows[0].place, rows[0].place + (num_rows or len(rows)))
        if places != self._shown:
            self.states.make_room(places.stop)
            for part in self._parts:
                for member, (index, name) in enumerate(part.members):
                    self.cache.layers[index].stores[name] = part.tensor[member, places]
            self.states.show(places)
            self._shown = places
        return self.forward

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path of nodes and forgets the rest of the trees.

        Costs nothing if the path already lies in the right slots, as a tree's first nodes do. If
        columns can't be moved, those of earlier steps are as they were.
        """
        (rows, tree_start, *_), moves = self.forward, []
        for row, path in zip(rows, paths, strict=True):
            # The nodes of a path lie after their targets: none is overwritten before it is read.
            for target, node in enumerate(path, start=row.num_columns):
                if tree_start + node != target:
                    moves.append((row.place, tree_start + node, target))
        if moves:
            move_columns(self._parts, moves)
        self.states.follow(rows[0].place, paths)
        for row, path in zip(rows, paths, strict=True):
            row.num_columns, row.position = row.num_columns + len(path), row.position + len(path)

    def text_kv(self, row: KVRow) -> TextKV:
        """Views of a row's committed columns, as far as windows have not dropped them."""
        members: Columns = {}
        for part in self._parts:
            first = max(row.first_columns[part.attention_type], part.first)
            committed = slice(first - part.first, row.num_columns - part.first)
            columns = part.tensor[:, row.place, :, committed].unsqueeze(1)  # (members, 1, H, N, D)
            members.update(zip(part.members, columns, strict=True))
        return TextKV(members, self.states.shown_of(slice(row.place, row.place + 1)))

    def wipe(self, rows: Sequence[int]) -> None:
        """Zeros all slots after the committed columns of some rows of the last forward.

        A hidden slot has weight 0, and 0 times a NaN that a draft has left is NaN.
        """
        for row in [self.forward.rows[index] for index in rows]:
            for part in self._parts:
                part.tensor[:, row.place, :, row.num_columns - part.first :] = 0

    def keep_rows(self, rows: Sequence[KVRow]) -> None:
        """Drops all rows but these, which move to the front in this order; none may move back."""
        if self.visible is not None:
            self.visible = self.visible[[row.place for row in rows]]
        for place, row in enumerate(rows):
            if row.place != place:
                for part in self._parts:
                    end = self._end - part.first
                    part.tensor[:, place, :, :end] = part.tensor[:, row.place, :, :end]
                self.states.move_row(row.place, place)
                row.place = place
        self.rows = list(rows)

    def release(self, *, fills: bool = True) -> None:
        """Gives transformers' cache its contents back if anybody gets it, and forgets all rows.

        Rows differ in length only after an error; then the cache has that of the shortest row.
        """
        if fills and self.rows:
            layers, places = self._their_layers, slice(0, len(self.rows))
            length = min(row.num_columns for row in self.rows)
            for part in self._parts:  # Slots that outlive the call are copied.
                part.give_back(layers, places, length, copies=self.policy.is_fixed)
            self.states.give_back(layers, places)
            if self.states.is_torn:  # Nobody may go on with these: without layers it is an error.
                layers.clear()
        self.clear()

    def clear(self) -> None:
        """Forgets all rows, and the slots too unless they outlive them."""
        self.rows, self._their_layers, self.visible = (), [], None
        self.forward, self._shown, self._end = _NO_FORWARD, None, 0
        if not self.policy.is_fixed:
            self._parts, self._members = [], {}
        self.states.clear(keeps_stores=self.policy.is_fixed)
        for layer in self.cache.layers:
            if isinstance(layer, KVLayer):
                layer.stores.clear()
                layer.keys = layer.values = None

    def _begin(self, cache: Cache, num_tokens: int) -> None:
        """Slots of the right formats for a first row; those of an earlier call, if they will do."""
        members, drops = members_in(cache, self.attention.by_layer), self.policy.drops
        if members != self._members:
            self._members, self._parts = members, split(members, num_tokens if drops else LARGE)
            self._generation += 1
        for part in self._parts:
            window = self.attention.windows[part.attention_type].size if drops else 0
            part.begin(cache.layers[part.members[0][0]], int(cache.get_seq_length()), window)
        self._end = 0

    def _make_room(
        self, part: Slots, rows: Sequence[KVRow], end: int, *, most: int | None = None
    ) -> bool:
        """Makes room for these rows up to a column; did the slots move?"""
        if most is None:
            most = max(row.max_columns for row in rows)
        shortest = min(row.num_columns for row in rows)
        before, need = part.size, Need(len(rows), end, most, part.window, shortest)
        size = self.policy.size(before, need)
        if size != before:
            part.resize(size, len(self.rows))
        if moved := size[:2] != before[:2]:
            self._generation += 1
            self._shown = None
            for index, name in part.members:  # What layers had can be freed.
                self.cache.layers[index].stores.pop(name, None)
                setattr(self.cache.layers[index], name, None)
        return moved
