"""Counts which tokens follow which in documents, with numpy, and makes corpus tables of the counts.

Documents come in chunks. The n-grams of a chunk are counted and merged with those before. If they
need more memory than there may be, the rarest of the longest ones are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.corpus import CorpusTables

Array = NDArray[Any]

_CHUNK = 1 << 20  # Tokens that are counted at once.
_NODE_BYTES = 96  # What one n-gram takes while two sets of them are merged.
_HEADER_BYTES = 8192  # The most that the header of a cache file may take.
_MAX_COUNT = (1 << 32) - 1
_HALF = 32  # The bits of a parent, and of a token, in a pair.
_END = -1  # Behind each document.


class Grams(NamedTuple):
    """The different n-grams of one length in lexicographic order, and how often each came.

    An n-gram is one that is a token shorter, by its index, and a last token.
    """

    parents: Array
    tokens: Array
    counts: Array


Trie = list[Grams]  # n-grams of 1, 2, … tokens.


def _add_up(parents: Array, tokens: Array, counts: Array) -> tuple[Grams, Array]:
    """Joins what is counted for the same parent and token; and for each row its index there."""
    pairs = (parents.astype(np.int64) << _HALF) | tokens
    different, indices = np.unique(pairs, return_inverse=True)
    sums = np.bincount(indices, counts, len(different)).astype(np.int64)
    parents = (different >> _HALF).astype(np.int32)
    return Grams(parents, (different & _MAX_COUNT).astype(np.uint32), sums), indices


def _trie_of(text: NDArray[np.int64], depth: int) -> Trie:
    """Counts the n-grams of documents, behind each of which stands an end."""
    trie = []
    starts = np.flatnonzero(text != _END)
    parents = np.zeros(len(starts), np.int64)
    for length in range(depth):
        grams, parents = _add_up(parents, text[starts + length], np.ones(len(starts), np.int64))
        trie.append(grams)
        longer = text[starts + length + 1] != _END
        starts, parents = starts[longer], parents[longer]
    return trie


def _joined(tries: Sequence[Trie]) -> Trie:
    """The sums of all counts."""
    joined = []
    indices = [np.zeros(1, np.int64) for _ in tries]
    for levels in zip(*tries, strict=True):
        parents = [index[level.parents] for index, level in zip(indices, levels, strict=True)]
        tokens, counts = (np.concatenate([level[i] for level in levels]) for i in (1, 2))
        grams, found = _add_up(np.concatenate(parents), tokens, counts)
        joined.append(grams)
        indices = _split(found, parents)
    return joined


def _without_rare(trie: Trie, length: int, least: int) -> Trie:
    """Drops n-grams of `length` tokens and more that came less often than `least`."""
    kept = trie[:length]
    indices = np.arange(len(kept[-1].counts))
    for grams in trie[length:]:
        chosen = grams.counts >= least
        parents = indices[grams.parents[chosen]]
        kept.append(Grams(parents, grams.tokens[chosen], grams.counts[chosen]))
        indices = np.cumsum(chosen) - 1
    return kept


def _size(trie: Trie) -> int:
    return sum(len(grams.counts) for grams in trie)


def _split(rows: Array, parts: Sequence[Array]) -> list[Array]:
    """Takes apart what was concatenated."""
    return np.split(rows, np.cumsum([len(part) for part in parts])[:-1])


class GramCounter:
    """Counts what follows each prefix of 1 to `max_prefix` tokens; n-grams stay in a document.

    `max_memory` bounds the arrays in bytes, beside the longest document and the finished tables.
    As long as all different n-grams fit, the counts are exact. Otherwise the rarest of the longest
    ones are dropped, so that some of them end with lower counts than they should.
    """

    def __init__(self, *, vocab_size: int, max_prefix: int = 4, max_memory: int = 1 << 32) -> None:
        self._vocab_size = vocab_size
        self._depth = max_prefix + 1
        self._max_size = max(max_memory // _NODE_BYTES, 4 * vocab_size)
        self._waiting: list[NDArray[np.int64]] = []
        self._num_waiting = 0
        self._tries: list[Trie] = []  # Each is at least twice as large as the next one.

    def add(self, token_ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Counts one document."""
        ids = np.asarray(token_ids, np.int64)
        for odd in (ids.min(), ids.max()) if ids.size else ():
            if not 0 <= odd < self._vocab_size:
                raise ValueError(f"token ids must be 0 to {self._vocab_size - 1} (got {odd})")
        self._waiting.append(np.append(ids, _END))
        self._num_waiting += len(ids)
        if self._num_waiting >= min(_CHUNK, self._max_size // 8):
            self._count_waiting()

    def tables(
        self,
        *,
        min_count: int = 2,
        max_continuations: int = 8,
        max_bytes: int = 64_000_000,
    ) -> CorpusTables:
        """The tables of all that was counted. Their `min_counts` say what was left out to fit.

        Each length of prefix starts with `min_count`. It is raised while the file would be larger
        than `max_bytes`, for the longest prefixes first.
        """
        self._count_waiting()
        empty = _trie_of(np.array([_END]), self._depth)
        self._tries = [_joined(self._tries or [empty])]
        token_dtype = np.dtype(np.uint16 if self._vocab_size <= 1 << 16 else np.uint32)
        levels = _levels_of(self._tries[0])
        return _pruned(levels, token_dtype, min_count, max_continuations, max_bytes)

    def _count_waiting(self) -> None:
        if not self._waiting:
            return
        tries = self._tries
        tries.append(_trie_of(np.concatenate(self._waiting), self._depth))
        self._waiting, self._num_waiting = [], 0
        while len(tries) > 1 and _size(tries[-2]) < 2 * _size(tries[-1]):
            tries[-2:] = [_joined(tries[-2:])]
        if sum(map(_size, tries)) > self._max_size:
            tries[:] = [self._cut(_joined(tries))]

    def _cut(self, trie: Trie) -> Trie:
        """Drops the rarest n-grams, the longest first, until half of the memory is free."""
        least = 1
        while _size(trie) > self._max_size // 2:
            least += 1
            for length in range(self._depth - 1, 0, -1):
                if _size(trie) > self._max_size // 2:
                    trie = _without_rare(trie, length, least)
        return trie


class _Level(NamedTuple):
    """Prefixes of one length in order, and the continuations of each, one group after another.

    A prefix's id counts the prefixes of its length, in order; kept ones keep it.
    """

    ids: Array
    parents: Array  # Ids of the prefixes that are one token shorter.
    tokens: Array  # The last token of each prefix.
    totals: Array
    sizes: Array  # The number of continuations of each prefix.
    next_tokens: Array
    next_counts: Array

    @classmethod
    def of(cls, prefixes: Grams, totals: Array, following: Grams) -> _Level:
        """The level of some prefixes, and of the n-grams that are a token longer."""
        ids = np.arange(len(prefixes.tokens))
        sizes = np.bincount(following.parents, minlength=len(ids))
        prefix = (ids, prefixes.parents, prefixes.tokens, totals)
        return cls(*prefix, sizes, following.tokens, following.counts)

    def kept(self, chosen: Array) -> _Level:
        """Only some continuations (a mask), and the prefixes that still have one."""
        owners = np.repeat(np.arange(len(self.ids)), self.sizes)
        sizes = np.bincount(owners[chosen], minlength=len(self.ids))
        full = sizes > 0
        ids, parents, tokens, totals = (column[full] for column in self[:4])
        prefixes = (ids, parents, tokens, totals, sizes[full])
        return _Level(*prefixes, self.next_tokens[chosen], self.next_counts[chosen])

    def frequent(self, min_count: int) -> _Level:
        """Leaves out continuations that came less often than `min_count`."""
        return self.kept(self.next_counts >= min_count)

    def best(self, max_continuations: int) -> _Level:
        """The most frequent continuations of each prefix, in that order; ties by lower token."""
        owners = np.repeat(np.arange(len(self.ids)), self.sizes)
        order = np.lexsort((self.next_tokens, -self.next_counts, owners))
        ranked = self._replace(
            next_tokens=self.next_tokens[order], next_counts=self.next_counts[order]
        )
        starts = np.cumsum(self.sizes) - self.sizes
        ranks = np.arange(len(owners)) - np.repeat(starts, self.sizes)
        return ranked.kept(ranks < max_continuations)

    def below(self, ids: Array) -> _Level:
        """Only the prefixes whose parents are among `ids`."""
        return self.kept(np.repeat(np.isin(self.parents, ids), self.sizes))


def _levels_of(trie: Trie) -> Iterator[_Level]:
    for prefixes, following in pairwise(trie):
        totals = np.bincount(following.parents, following.counts, len(prefixes.tokens))
        yield _Level.of(prefixes, totals.astype(np.int64), following)


def _pruned(
    levels: Iterable[_Level],
    token_dtype: np.dtype[Any],
    min_count: int,
    max_continuations: int,
    max_bytes: int,
) -> CorpusTables:
    """The tables of what is kept.

    Where the file would pass `max_bytes`, min_count is raised by one for the longest prefixes, then
    for those a token shorter, and so on round and round, until it does not.
    """
    kept = [level.frequent(min_count).best(max_continuations) for level in levels]
    min_counts = [min_count] * len(kept)
    while _file_bytes(kept, token_dtype.itemsize) > max_bytes:
        lowest = min(min_counts)
        longest = len(kept) - 1 - min_counts[::-1].index(lowest)
        min_counts[longest] += 1
        kept[longest] = kept[longest].frequent(lowest + 1)
    arrays = {}
    for length, level in enumerate(kept, start=1):
        arrays[f"token.{length}"] = level.tokens.astype(token_dtype)
        arrays[f"total.{length}"] = _limited(level.totals)
        arrays[f"next.{length}"] = np.append(0, np.cumsum(level.sizes)).astype(np.uint32)
        arrays[f"next_token.{length}"] = level.next_tokens.astype(token_dtype)
        arrays[f"next_count.{length}"] = _limited(level.next_counts)
        if length < len(kept):
            longer = kept[length] = kept[length].below(level.ids)
            starts = np.searchsorted(longer.parents, level.ids)
            arrays[f"child.{length}"] = np.append(starts, len(longer.ids)).astype(np.uint32)
    return CorpusTables.from_arrays(arrays, min_counts=min_counts)


def _file_bytes(levels: Sequence[_Level], token_bytes: int) -> int:
    num_prefixes = sum(len(level.ids) for level in levels)
    num_next = sum(len(level.next_tokens) for level in levels)
    offsets = 4 * (2 * num_prefixes - len(levels[-1].ids) + 2 * len(levels) - 1)
    return _HEADER_BYTES + offsets + (token_bytes + 4) * (num_prefixes + num_next)


def _limited(counts: Array) -> Array:
    return np.minimum(counts, _MAX_COUNT).astype(np.uint32)


def merge_tables(
    tables: Sequence[CorpusTables],
    *,
    min_count: int = 1,
    max_continuations: int = 8,
    max_bytes: int = 64_000_000,
) -> CorpusTables:
    """One table with the sums of all counts; the order of the tables makes no difference.

    What a table has pruned is missing from the sums. The result's `min_counts` say what was left
    out to fit into `max_bytes`.
    """
    lengths = sorted({part.max_prefix for part in tables})
    if len(lengths) != 1:
        raise ValueError(f"tables to merge must have the same max_prefix (got {lengths or 'none'})")
    arrays = [part.arrays() for part in tables]
    token_dtype = np.result_type(*(part["token.1"] for part in arrays))
    levels = _summed_levels(arrays, lengths[0])
    return _pruned(levels, token_dtype, min_count, max_continuations, max_bytes)


def _summed_levels(tables: Sequence[dict[str, Array]], max_prefix: int) -> Iterator[_Level]:
    """All tables' prefixes of each length, with the sums of what they count."""

    def joined(name: str) -> Array:
        return np.concatenate([table[name] for table in tables])

    def owners(offsets: str) -> list[Array]:
        """For each child or continuation of each table, the index of the prefix it belongs to."""
        spans = [table[offsets].astype(np.int64) for table in tables]
        pairs = zip(indices, spans, strict=True)
        return [np.repeat(index, span[1:] - span[:-1]) for index, span in pairs]

    parents = [np.zeros(len(table["token.1"]), np.int64) for table in tables]
    for n in range(1, max_prefix + 1):
        prefixes, found = _add_up(
            np.concatenate(parents), joined(f"token.{n}"), joined(f"total.{n}")
        )
        indices = _split(found, parents)
        followed = np.concatenate(owners(f"next.{n}"))
        after, _ = _add_up(followed, joined(f"next_token.{n}"), joined(f"next_count.{n}"))
        yield _Level.of(prefixes, prefixes.counts, after)
        if n < max_prefix:
            parents = owners(f"child.{n}")
