"""Prunes prefixes level by level, and makes the tables of what is kept.

Prefixes come in order with all their continuations, from a corpus or from other tables. No more
of them are kept than the tables may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.corpus import CorpusTables

_HEADER_BYTES = 8192  # The most that the header of the file may take.
_MIN_BYTES = _HEADER_BYTES + 4096
_MAX_COUNT = (1 << 32) - 1

Array = NDArray[Any]


class Groups(NamedTuple):
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

    def kept(self, chosen: Array) -> Groups:
        """Only some continuations (a mask), and the prefixes that still have one."""
        owners = np.repeat(np.arange(len(self.ids)), self.sizes)
        sizes = np.bincount(owners[chosen], minlength=len(self.ids))
        full = sizes > 0
        ids, parents, tokens, totals = (column[full] for column in self[:4])
        prefixes = (ids, parents, tokens, totals, sizes[full])
        return Groups(*prefixes, self.next_tokens[chosen], self.next_counts[chosen])

    def frequent(self, min_count: int) -> Groups:
        """Leaves out continuations that came less often than `min_count`."""
        return self.kept(self.next_counts >= min_count)

    def best(self, max_continuations: int) -> Groups:
        """The most frequent continuations of each prefix, in that order; ties by lower token."""
        owners = np.repeat(np.arange(len(self.ids)), self.sizes)
        order = np.lexsort((self.next_tokens, -self.next_counts, owners))
        ranked = self._replace(
            next_tokens=self.next_tokens[order], next_counts=self.next_counts[order]
        )
        starts = np.cumsum(self.sizes) - self.sizes
        ranks = np.arange(len(owners)) - np.repeat(starts, self.sizes)
        return ranked.kept(ranks < max_continuations)

    def below(self, ids: Array) -> Groups:
        """Only the prefixes whose parents are among `ids`."""
        return self.kept(np.repeat(np.isin(self.parents, ids), self.sizes))

    @classmethod
    def joined(cls, parts: Sequence[Groups]) -> Groups:
        """Joins groups that came one after the other."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Levels:
    """Takes groups of all levels and keeps what fits.

    `min_count` leaves out rarer continuations, `max_continuations` all but the most frequent of a
    prefix. Where the file would pass `max_bytes`, min_count is raised by one for the longest
    prefixes, then for those a token shorter, and so on round and round, until it does not.

    It prunes on what came so far, and ends at the same `min_counts` as if all had been there at
    once: what does not fit in part never fits in whole.
    """

    def __init__(
        self,
        max_prefix: int,
        token_dtype: np.dtype[Any],
        min_count: int,
        max_continuations: int,
        max_bytes: int,
    ) -> None:
        _check_least("min_count", min_count, 1)
        _check_least("max_continuations", max_continuations, 1)
        _check_least("max_bytes", max_bytes, _MIN_BYTES)
        self._max_continuations, self._max_bytes = max_continuations, max_bytes
        self._token_dtype = token_dtype
        self._levels: list[list[Groups]] = [[_EMPTY] for _ in range(max_prefix)]
        self.min_counts = [min_count] * max_prefix  # A longer prefix never has a lower one.

    def add(self, length: int, groups: Groups) -> None:
        """Takes the next prefixes of one length, each with all its continuations."""
        groups = groups.frequent(self.min_counts[length - 1]).best(self._max_continuations)
        if not len(groups.ids):
            return
        self._levels[length - 1].append(groups)
        while self._file_bytes() > self._max_bytes:
            self._prune_further()

    def tables(self) -> CorpusTables:
        """The tables of all that was kept."""
        whole = [Groups.joined(parts) for parts in self._levels]
        for shorter, length in enumerate(range(1, len(whole))):
            whole[length] = whole[length].below(whole[shorter].ids)
        arrays = {}
        for length, groups in enumerate(whole, start=1):
            arrays.update(_arrays_of(groups, length, self._token_dtype))
            if length < len(whole):
                arrays[f"child.{length}"] = _children(groups, whole[length])
        return CorpusTables.from_arrays(arrays, min_counts=self.min_counts)

    def _file_bytes(self) -> int:
        token = self._token_dtype.itemsize
        num_prefixes = sum(len(part.ids) for parts in self._levels for part in parts)
        num_next = sum(len(part.next_tokens) for parts in self._levels for part in parts)
        num_last = sum(len(part.ids) for part in self._levels[-1])
        offsets = 4 * (2 * num_prefixes - num_last + 2 * len(self._levels) - 1)
        return _HEADER_BYTES + offsets + (token + 4) * (num_prefixes + num_next)

    def _prune_further(self) -> None:
        """Raises the min_count of the longest prefixes that still have the lowest one."""
        lowest = min(self.min_counts)
        level = len(self.min_counts) - 1 - self.min_counts[::-1].index(lowest)
        self.min_counts[level] += 1
        self._levels[level] = [Groups.joined(self._levels[level]).frequent(lowest + 1)]


_EMPTY = Groups(*(np.zeros(0, np.int64) for _ in Groups._fields))


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be >= {least} (got {value})")


def _arrays_of(groups: Groups, length: int, token_dtype: np.dtype[Any]) -> dict[str, Array]:
    return {
        f"token.{length}": groups.tokens.astype(token_dtype),
        f"total.{length}": _limited(groups.totals),
        f"next.{length}": _offsets(groups.sizes),
        f"next_token.{length}": groups.next_tokens.astype(token_dtype),
        f"next_count.{length}": _limited(groups.next_counts),
    }


def _children(groups: Groups, longer: Groups) -> Array:
    starts = np.searchsorted(longer.parents, groups.ids)
    return np.append(starts, len(longer.ids)).astype(np.uint32)


def _offsets(sizes: Array) -> Array:
    return np.append(0, np.cumsum(sizes)).astype(np.uint32)


def _limited(counts: Array) -> Array:
    return np.minimum(counts, _MAX_COUNT).astype(np.uint32)
