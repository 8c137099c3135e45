"""The keys and values of some rows while drafting, with room after them for trees.

This module and `slots` hold all that depends on transformers' cache API. A prompt's forward fills a
stock cache as always. `TreeKV.add` moves its contents into slots, on which drafting works, and
`release` gives them back as if stock decoding had filled the cache. A policy of `room` says how
many slots there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from selfspec.forward.columns import Columns, TextKV
from selfspec.forward.layout import Layout
from selfspec.forward.model import AttentionTypes
from selfspec.forward.room import KVRow, Policy
from selfspec.forward.slots import (
    LARGE,
    Kind,
    KVLayer,
    Member,
    Slots,
    kinds_in,
    move_columns,
    split,
)
from selfspec.forward.states.slots import Moves, StateLayer, States, settle

_LEAST_LENGTH = 256


def length_bucket(length: int) -> int:
    """How many keys a captured forward gets if it needs `length` of them.

    >>> [length_bucket(length) for length in (1, 256, 257, 3000)]
    [256, 256, 512, 4096]
    """
    return max(_LEAST_LENGTH, 1 << (length - 1).bit_length())


class _KVAndStateLayer(StateLayer, KVLayer):
    """One layer that has attention beside running states."""

    def __init__(self, kv: TreeKV, attention_type: str, states: States, index: int) -> None:
        KVLayer.__init__(self, kv, attention_type)
        StateLayer.__init__(self, states, index)


def layers_for(attention: AttentionTypes, kv: TreeKV) -> list[Any]:
    """The layers of a cache as a model sees it in forwards over trees."""
    layers: list[Any] = []
    for index, name in enumerate(attention.by_layer):
        if index not in attention.states:
            layers.append(KVLayer(kv, str(name)))
        elif name is None:
            layers.append(StateLayer(kv.states, index))
        else:
            layers.append(_KVAndStateLayer(kv, name, kv.states, index))
        if index in attention.states:
            kv.states.layers[index] = layers[-1]
    return layers


class Forward(NamedTuple):
    """Where the trees of one forward over some rows are.

    They begin at the column `front`, which is the length of the longest of these rows. `firsts` has
    the column of each attention type's first slot: windowed layers drop the columns that no query
    can see any more, where the policy allows it.
    """

    rows: Sequence[KVRow]
    front: int
    firsts: Mapping[str, int]


class _Due(NamedTuple):
    """What a commit is to do: rows, each with its new length and position, and moves of states."""

    rows: Sequence[tuple[KVRow, int, Any]]
    moves: Moves


class TreeKV:
    """Committed columns of rows, with room after them for one tree per row.

    Each row knows its place among the slots and its number of columns. The model is given `cache`,
    whose layers look at the `forward` for which room was made last. `visible` says which columns of
    the prompt count, row by row; None if all do.

    During a captured forward its `layout` says which slots it writes and sees. `generation` grows
    when slots get another address; captures of an earlier generation must not be replayed.
    """

    def __init__(self, attention: AttentionTypes, policy: Policy) -> None:
        self.policy = policy
        self.rows: Sequence[KVRow] = ()  # Those that have places, in their order.
        self.forward = Forward((), 0, {})
        self.visible: torch.Tensor | None = None  # (B, P) bool
        self.layout: Layout | None = None
        self._generation = 0
        self.states = States()
        self.cache = DynamicCache()
        self.cache.layers = layers_for(attention, self)
        self._attention = attention
        self._layers: list[CacheLayerMixin] = []  # The stock layers that the first rows were in.
        self._kinds: dict[Kind, list[Member]] = {}
        self._parts: list[Slots] = []
        self._shown = 0, 0, -1  # The places that the layers show, and the generation of slots.
        self._end = 0  # No slot from this column on was written since rows came.
        self._due = _Due((), [])

    @property
    def kind(self) -> Kind:
        """Where the slots are, and of what dtype, which the masks must have too."""
        return self._parts[0].kind if self._parts else Kind("", 0, 0, *self.states.kind)

    @property
    def generation(self) -> int:
        return self._generation + self.states.generation

    @property
    def num_rows(self) -> int:
        """How many rows have slots; fewer may be in use."""
        return min((part.room.rows for part in self._parts), default=0)

    @property
    def num_columns(self) -> int:
        """How many columns each row has slots for."""
        return max((part.room.columns for part in self._parts), default=0)

    @property
    def nbytes(self) -> int:
        return sum(part.tensor.nbytes for part in self._parts) + self.states.nbytes

    @property
    def bytes_each(self) -> int:
        """What one column of one row takes."""
        return sum(len(part.members) * part.kind.num_bytes for part in self._parts)

    @property
    def front(self) -> int:
        """How many columns the longest row has."""
        return max((row.num_columns for row in self.rows), default=0)

    def num_keys(self, width: int) -> dict[str, int]:
        """How many slots of each attention type a captured forward of `width` nodes sees."""
        _, front, firsts = self.forward
        found = dict.fromkeys(
            firsts, length_bucket(front + width - min(firsts.values(), default=0))
        )
        for part in self._parts:
            name = part.kind.attention_type
            found[name] = min(found[name], part.room.columns)
        return found

    def add(self, cache: Cache, rows: Sequence[KVRow], others: Sequence[KVRow] = ()) -> None:
        """Moves what a prompt has put into a stock cache to places after others', and empties it.

        On any exception, the cache and the other rows are unchanged.
        """
        first, length = len(others), rows[0].num_columns
        if not first:
            self._begin(cache, len(rows) * length)
        layers, everyone = list(cache.layers), [*others, *rows]
        firsts = {part.kind.attention_type: length - part.num_in(layers) for part in self._parts}
        places = slice(first, first + len(rows))
        self.rows, front = list(others), max(row.num_columns for row in everyone)
        try:
            for part in self._parts:
                if not self._make_room(part, everyone, front):
                    part.tensor[:, places].zero_()  # An earlier row may leave a NaN.
                part.fill(first, layers, length)
            self.states.add(layers, first, max(self.num_rows, places.stop))
        except BaseException:  # No memory, or an interrupt.
            for part in self._parts:
                part.give_back(layers, places, length, copies=self.policy.outlives)
            raise
        for place, row in enumerate(rows, first):
            row.place, row.first_columns = place, firsts
        self.rows, self._layers, self._end = everyone, layers, max(self._end, front)

    def reserve(self, rows: Sequence[KVRow], width: int, num_rows: int | None = None) -> Forward:
        """Makes room for trees of `width` nodes of some rows, which lie side by side.

        The layers show their places, and the next ones if a forward has surplus rows.
        """
        front = max(row.num_columns for row in rows)
        firsts = dict.fromkeys(self._attention.windows, 0)
        end = front + width
        for part in self._parts:
            if end - part.first > part.tensor.shape[3]:
                try:
                    self._make_room(part, rows, end)
                except RuntimeError:  # There may be memory for this tree, if not for later ones.
                    self._make_room(part, rows, end, spare=False)
            firsts[part.kind.attention_type] = part.first
        self.forward, self._end = Forward(rows, front, firsts), max(self._end, end)
        self.states.make_room(num_rows or len(rows))
        shown = rows[0].place, num_rows or len(rows), self.generation
        if shown != self._shown:
            self._shown, places = shown, slice(shown[0], sum(shown[:2]))
            for part in self._parts:
                for member, (index, name) in enumerate(part.members):
                    self.cache.layers[index].stores[name] = part.tensor[member, places]
            self.states.show(places)
        return self.forward

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path of nodes and forgets the rest of the trees.

        Costs nothing if the path already lies in the right slots, as a tree's first nodes do. What
        breaks off here leaves the columns of earlier steps as they were.
        """
        # The nodes of a path lie after their targets, so none is overwritten before it is read.
        moves, (rows, front, _) = [], self.forward
        for row, path in zip(rows, paths, strict=True):
            targets = enumerate(path, start=row.num_columns)
            moves += [(row.place, front + n, to) for to, n in targets if front + n != to]
        if moves:
            move_columns(self._parts, moves)
        states = self.states.moves(rows[0].place, paths)
        after = [
            (row, row.num_columns + len(path), row.position + len(path))
            for row, path in zip(rows, paths, strict=True)
        ]
        self._due = _Due(after, states)  # Until here nothing has changed.
        self._settle()

    def _settle(self) -> None:
        """Does the rest of what the last commit is to do, so that states are where rows are."""
        for row, num_columns, position in self._due.rows:
            row.num_columns, row.position = num_columns, position
        settle(self._due.moves)
        self._due = _Due((), [])

    def text_kv(self, row: KVRow) -> TextKV:
        """Views of a row's committed columns, as far as windows have not dropped them."""
        members: Columns = {}
        for part in self._parts:
            first = max(row.first_columns[part.kind.attention_type], part.first)
            committed = slice(first - part.first, row.num_columns - part.first)
            columns = part.tensor[:, row.place, :, committed].unsqueeze(1)  # (members, 1, H, N, D)
            members.update(zip(part.members, columns, strict=True))
        return TextKV(members, self.states.shown_of(slice(row.place, row.place + 1)))

    def wipe(self, rows: Sequence[int]) -> None:
        """Zeros all slots after the committed columns of some rows of the last forward.

        A hidden slot has weight 0, and 0 times a NaN that a draft has left is NaN.
        """
        for part, row in product(self._parts, map(self.forward.rows.__getitem__, rows)):
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
        """Gives the stock cache its contents back, up to the shortest row's length.

        Rows differ in length only if nobody gets the cache, or after an error. Slots that outlive
        the call are copied, so the cache stays empty if nobody gets it: if `fills` is false.
        """
        if fills:
            self._settle()
        layers, rows = self._layers, self.rows
        if rows and (fills or not self.policy.outlives):
            length, places = min(row.num_columns for row in rows), slice(0, len(rows))
            for part in self._parts:
                part.give_back(layers, places, length, copies=self.policy.outlives)
            if fills:
                self.states.give_back(layers, places)
        self.clear()

    def clear(self) -> None:
        """Forgets all rows, and the slots too unless they outlive them."""
        self.rows, self._layers, self.visible, self.layout = (), [], None, None
        self.forward, self._end, self._due = Forward((), 0, {}), 0, _Due((), [])
        if not self.policy.outlives:
            self._parts, self._kinds = [], {}
        self._shown = 0, 0, -1
        self.states.clear(keeps_stores=self.policy.outlives)
        for layer in self.cache.layers:
            if isinstance(layer, KVLayer):
                layer.stores.clear()
                layer.keys = layer.values = None

    def _begin(self, cache: Cache, num_tokens: int) -> None:
        """Slots of the right kinds for a first row; those of an earlier call, if they will do."""
        kinds = kinds_in(cache, self._attention.by_layer)
        if kinds != self._kinds:
            self._kinds = kinds
            self._parts = split(kinds, num_tokens if self.policy.drops else LARGE)
            self._generation += 1
        for part in self._parts:
            size = self._attention.windows[part.kind.attention_type].size
            window = size if self.policy.drops else 0
            part.begin(cache.layers[part.members[0][0]], int(cache.get_seq_length()), window)
        self._end = 0

    def _make_room(
        self, part: Slots, rows: Sequence[KVRow], end: int, *, spare: bool = True
    ) -> bool:
        """Makes room for these rows up to a column; did the slots move?"""
        before, room = part.room, self.policy.room(part, rows, end, spare=spare)
        if room == before:
            return False
        part.resize(room, len(self.rows))
        moved = room[:2] != before[:2]
        if moved:
            self._generation += 1
            for index, name in part.members:  # What layers had can be freed.
                self.cache.layers[index].stores.pop(name, None)
                setattr(self.cache.layers[index], name, None)
        return moved
