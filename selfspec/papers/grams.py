"""Counts which tokens follow which in documents, with numpy, and makes corpus tables of the counts.

Documents come in chunks. The n-grams of a chunk are counted and merged with those before. If they
need more memory than there may be, the rarest of the longest ones are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.errors import BuildError
from selfspec.papers.corpus import CorpusTables

Array = NDArray[Any]

_CHUNK = 1 << 20  # Tokens that are counted at once.
_GRAM_BYTES = 112  # What one n-gram takes while two sets of them are merged.
_HEADER_BYTES = 8192  # The most that the header of a cache file may take.
_MAX_COUNT = (1 << 32) - 1
_HALF = 32  # The bits of a parent, and of a token, in a pair.
_END = -1  # After each document.


class Grams(NamedTuple):
    """The different n-grams of one length in lexicographic order, and what is counted of each.

    An n-gram is the index of its first n - 1 tokens in the level before, and its last token.
    """

    parents: Array
    tokens: Array
    counts: Array  # How often it came.
    totals: Array  # How often anything came after it.


Trie = list[Grams]  # n-grams of 1, 2, … tokens.


def _add_up(parents: Array, tokens: Array, counts: Array, totals: Array) -> tuple[Grams, Array]:
    """The sums of the rows of each parent and token, and for each row the index of its sum."""
    pairs = (parents.astype(np.int64) << _HALF) | tokens
    different, indices = np.unique(pairs, return_inverse=True)
    sums = (np.bincount(indices, each, len(different)) for each in (counts, totals))
    counts, totals = (each.astype(np.int64) for each in sums)
    parents = (different >> _HALF).astype(np.int32)
    return Grams(parents, (different & _MAX_COUNT).astype(np.uint32), counts, totals), indices


def _count(text: NDArray[np.int64], depth: int) -> Trie:
    """Counts the n-grams of documents. After each document there is an `_END`."""
    trie = []
    starts = np.flatnonzero(text != _END)
    parents = np.zeros(len(starts), np.int64)
    for length in range(depth):
        longer = text[starts + length + 1] != _END
        grams, parents = _add_up(parents, text[starts + length], np.ones(len(starts)), longer)
        trie.append(grams)
        starts, parents = starts[longer], parents[longer]
    return trie


def _merge(tries: Sequence[Trie]) -> Trie:
    merged = []
    indices = [np.zeros(1, np.int64) for _ in tries]
    for levels in zip(*tries, strict=True):
        parents = [index[level.parents] for index, level in zip(indices, levels, strict=True)]
        columns = (np.concatenate([level[i] for level in levels]) for i in (1, 2, 3))
        grams, found = _add_up(np.concatenate(parents), *columns)
        merged.append(grams)
        indices = np.split(found, np.cumsum([len(part) for part in parents])[:-1])
    return merged


def _without_rare(trie: Trie, length: int, least: int) -> Trie:
    kept = trie[:length]
    indices = np.arange(len(kept[-1].counts))
    for grams in trie[length:]:
        chosen = grams.counts >= least
        columns = (column[chosen] for column in grams[1:])
        kept.append(Grams(indices[grams.parents[chosen]], *columns))
        indices = np.cumsum(chosen) - 1
    return kept


def _size(trie: Trie) -> int:
    return sum(len(grams.counts) for grams in trie)


class GramCounter:
    """Counts what follows each prefix of 1 to `max_prefix` tokens; n-grams stay in a document.

    `max_memory` bounds the arrays in bytes, without the longest document and the finished tables.
    The counts are exact while all different n-grams fit. Otherwise the rarest of the longest ones
    are dropped, and those that come again later are counted from 0.
    """

    def __init__(self, *, vocab_size: int, max_prefix: int = 4, max_memory: int = 1 << 32) -> None:
        self._vocab_size = vocab_size
        self._depth = max_prefix + 1
        self._max_size = max(max_memory // _GRAM_BYTES, 4 * vocab_size)
        self._waiting: list[NDArray[np.int64]] = []
        self._num_waiting = 0
        self._tries: list[Trie] = []  # Each is at least twice as large as the next one.

    def add(self, token_ids: Sequence[int] | NDArray[np.integer]) -> None:
        ids = np.asarray(token_ids, np.int64)
        for odd in (ids.min(), ids.max()) if ids.size else ():
            if not 0 <= odd < self._vocab_size:
                raise BuildError(
                    f"the token ids of --data must be 0 to {self._vocab_size - 1} (got {odd})"
                )
        self._waiting.append(np.append(ids, _END))
        self._num_waiting += len(ids)
        if self._num_waiting >= min(_CHUNK, self._max_size // 8):
            self._count_waiting()

    def tables(
        self, *, min_count: int = 2, max_continuations: int = 8, max_bytes: int = 64_000_000
    ) -> CorpusTables:
        self._count_waiting()
        self._tries = [_merge(self._tries or [_count(np.array([_END]), self._depth)])]
        token_dtype = np.dtype(np.uint16 if self._vocab_size <= 1 << 16 else np.uint32)
        return tables_of(self._tries[0], token_dtype, min_count, max_continuations, max_bytes)

    def _count_waiting(self) -> None:
        if not self._waiting:
            return
        tries = self._tries
        tries.append(_count(np.concatenate(self._waiting), self._depth))
        self._waiting, self._num_waiting = [], 0
        while len(tries) > 1 and _size(tries[-2]) < 2 * _size(tries[-1]):
            tries[-2:] = [_merge(tries[-2:])]
        if sum(map(_size, tries)) > self._max_size:
            tries[:] = [self._cut(_merge(tries))]

    def _cut(self, trie: Trie) -> Trie:
        """Drops the rarest n-grams, the longest first, until half of the memory is free."""
        least = 1
        while _size(trie) > self._max_size // 2:
            least += 1
            for length in range(self._depth - 1, 0, -1):
                if _size(trie) > self._max_size // 2:
                    trie = _without_rare(trie, length, least)
        return trie


def tables_of(
    trie: Trie,
    token_dtype: np.dtype[Any],
    min_count: int,
    max_continuations: int,
    max_bytes: int,
) -> CorpusTables:
    """The most frequent continuations of each prefix; ties by lower token.

    Continuations that came less often than `min_count` are left out. While the file would be larger
    than `max_bytes` (at least `LEAST_BYTES` of `recipe`), the minimum is raised by one: for the
    longest prefixes, then for those a token shorter, and so on, round and round. The tables'
    `min_counts` hold the result.
    """
    levels = trie[1:]
    kept = [(level.counts >= min_count) & (_ranks(level) < max_continuations) for level in levels]
    min_counts = [min_count] * len(levels)
    while _file_bytes(levels, kept, token_dtype.itemsize) > max_bytes:
        lowest = min(min_counts)
        longest = len(levels) - 1 - min_counts[::-1].index(lowest)
        min_counts[longest] += 1
        kept[longest] &= levels[longest].counts > lowest
    arrays: dict[str, Array] = {}
    shorter: Array | None = None  # The prefixes of one token less that have a row.
    for length, (grams, longer, chosen) in enumerate(zip(trie, levels, kept, strict=False), 1):
        prefixes = np.unique(longer.parents[chosen])
        if shorter is not None:
            prefixes = prefixes[np.isin(grams.parents[prefixes], shorter)]
            arrays[f"child.{length - 1}"] = _offsets(grams.parents[prefixes], shorter)
            chosen = chosen & np.isin(longer.parents, prefixes)
        order = np.flatnonzero(chosen)
        order = order[
            np.lexsort((longer.tokens[order], -longer.counts[order], longer.parents[order]))
        ]
        arrays[f"token.{length}"] = grams.tokens[prefixes].astype(token_dtype)
        arrays[f"total.{length}"] = _limited(grams.totals[prefixes])
        arrays[f"next.{length}"] = _offsets(longer.parents[order], prefixes)
        arrays[f"next_token.{length}"] = longer.tokens[order].astype(token_dtype)
        arrays[f"next_count.{length}"] = _limited(longer.counts[order])
        shorter = prefixes
    return CorpusTables.from_arrays(arrays, min_counts=min_counts)


def _ranks(grams: Grams) -> Array:
    """The place of each n-gram among those with the same beginning, the most frequent one first."""
    order = np.lexsort((grams.tokens, -grams.counts, grams.parents))
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - np.searchsorted(grams.parents, grams.parents)
    return ranks


def _offsets(owners: Array, prefixes: Array) -> Array:
    """Where the rows of each prefix start, among rows in the order of their prefixes."""
    return np.append(np.searchsorted(owners, prefixes), len(owners)).astype(np.uint32)


def _file_bytes(levels: Sequence[Grams], kept: Sequence[Array], token_bytes: int) -> int:
    owners = (level.parents[chosen] for level, chosen in zip(levels, kept, strict=True))
    prefixes = [np.count_nonzero(np.diff(each, prepend=-1)) for each in owners]
    num_next = sum(map(np.count_nonzero, kept))
    offsets = 4 * (2 * sum(prefixes) - prefixes[-1] + 2 * len(levels) - 1)
    return int(_HEADER_BYTES + offsets + (token_bytes + 4) * (sum(prefixes) + num_next))


def _limited(counts: Array) -> Array:
    return np.minimum(counts, _MAX_COUNT).astype(np.uint32)
