"""Turns sorted n-grams, block by block, into prefixes of all lengths with continuations.

All positions of a corpus that share their first m tokens stand side by side, so one pass counts
every length. What a block leaves open waits for the next one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.building.grams.keys import Counted, GramKeys
from selfspec.building.grams.levels import Groups, Levels

Array = NDArray[Any]


class _Rows(NamedTuple):
    """n-grams of one length as a prefix and the token behind it, and how often they came."""

    ids: Array  # Ids of the prefixes.
    parents: Array
    tokens: Array
    next_tokens: Array
    counts: Array

    def part(self, rows: slice) -> _Rows:
        return _Rows(*(column[rows] for column in self))

    def groups(self) -> Groups:
        """The rows grouped by prefix, without those that end a document."""
        rows = _Rows(*(column[self.next_tokens > 0] for column in self))
        starts = np.flatnonzero(np.diff(rows.ids, prepend=-1))
        if not len(starts):
            return Groups(*(np.zeros(0, np.int64) for _ in Groups._fields))
        totals = np.add.reduceat(rows.counts, starts)
        sizes = np.diff(starts, append=len(rows.ids))
        prefixes = (rows.ids[starts], rows.parents[starts], rows.tokens[starts] - 1)
        return Groups(*prefixes, totals, sizes, rows.next_tokens - 1, rows.counts)


class _OneLength:
    """Collects the prefixes of one length, and holds back the last one.

    The next block may go on with it. That is at most one row for each token of the vocabulary.
    """

    def __init__(self) -> None:
        empty = np.zeros(0, np.int64)
        self._open = _Rows(empty, empty, empty.astype(np.uint32), empty.astype(np.uint32), empty)

    def push(self, open_count: int, rows: _Rows) -> Groups:
        """Takes rows in order, and more of the row before; returns the prefixes that are whole."""
        if len(self._open.counts):
            self._open.counts[-1] += open_count
        rows = _Rows(*(np.concatenate(pair) for pair in zip(self._open, rows, strict=True)))
        first_open = int(np.searchsorted(rows.ids, rows.ids[-1])) if len(rows.ids) else 0
        self._open = _Rows(*(column.copy() for column in rows.part(slice(first_open, None))))
        return rows.part(slice(first_open)).groups()

    def rest(self) -> Groups:
        """The prefix that was held back."""
        return self._open.groups()


class Grouping:
    """Goes through the lengths of prefix for each block and gives whole prefixes to `levels`."""

    def __init__(self, keys: GramKeys, levels: Levels) -> None:
        self._keys = keys
        self._levels = levels
        self._lengths = [_OneLength() for _ in range(keys.length - 1)]
        self._last_tokens = [-1] * keys.length  # Those of the n-gram before the block.
        self._num_ids = [0] * keys.length  # Prefixes so far; the index is the length - 1.

    def add(self, block: Counted) -> None:
        """Takes the next n-grams in order, in blocks of any size."""
        num_rows = len(block.counts)
        if not num_rows:
            return
        changed = np.zeros(num_rows, bool)  # Does a row differ from the one before it?
        tokens = np.zeros(num_rows, np.uint32)
        parents = ids = np.zeros(num_rows, np.int64)
        for length in range(self._keys.length):  # This is the length of the prefix.
            next_tokens = self._keys.tokens(block.words, length)
            changed |= self._changes(next_tokens, length)
            if length:
                columns = (ids, parents, tokens, next_tokens)
                self._push(length, np.flatnonzero(changed), columns, block.counts)
            parents, ids, tokens = ids, self._ids(changed, length), next_tokens

    def finish(self) -> None:
        """Gives what was held back."""
        for length, of_length in enumerate(self._lengths, start=1):
            self._levels.add(length, of_length.rest())

    def _push(
        self,
        length: int,
        starts: NDArray[np.int64],
        columns: tuple[Array, Array, Array, Array],
        counts: NDArray[np.int64],
    ) -> None:
        """Joins the rows that share prefix and next token, and gives them to their length."""
        first = starts[0] if len(starts) else len(counts)
        sums = np.add.reduceat(counts, starts) if len(starts) else counts[:0]
        ids, parents, tokens, next_tokens = (column[starts] for column in columns)
        rows = _Rows(ids, parents, tokens, next_tokens, sums)
        groups = self._lengths[length - 1].push(int(counts[:first].sum()), rows)
        self._levels.add(length, groups)

    def _changes(self, tokens: NDArray[np.uint32], position: int) -> NDArray[np.bool_]:
        before = np.append(np.int64(self._last_tokens[position]), tokens[:-1])
        self._last_tokens[position] = int(tokens[-1])
        changes: NDArray[np.bool_] = tokens != before
        return changes

    def _ids(self, changed: NDArray[np.bool_], position: int) -> NDArray[np.int64]:
        """Numbers the prefixes that end at a position; one that goes on keeps its number."""
        ids = np.cumsum(changed) + (self._num_ids[position] - 1)
        self._num_ids[position] = int(ids[-1]) + 1
        return ids
