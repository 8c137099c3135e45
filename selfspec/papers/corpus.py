"""What follows a phrase in a corpus: read-only n-gram tables, and the source that asks them.

Longer prefixes first, then higher frequency. Knows neither the corpus nor the file of the
arrays, and trusts neither: every bound is checked where it is used.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import MAX_BIN, Candidate, Evidence, StepRecord

_MAX_PREFIX = 8
# The counts that start the second and the third bucket.
_SOME, _MANY = 4, 16
_TOKENS = ("token", "next_token")
_UINT16, _UINT32 = np.dtype(np.uint16), np.dtype(np.uint32)

Array = NDArray[Any]
# The prefixes that the text ends in: for its last 1, 2, … tokens the index in that level, or -1.
Prefixes = tuple[int, ...]


class _Level(NamedTuple):
    """The prefixes of one length, as memoryviews: read in Python ten times faster than arrays."""

    size: int  # number of prefixes
    offsets: memoryview  # of the prefix one token shorter -> where its children start here
    tokens: memoryview
    totals: memoryview
    starts: memoryview  # of a prefix here -> where its continuations start
    next_tokens: memoryview
    next_counts: memoryview

    def find(self, parent: int, token: int) -> int:
        """The child of a shorter prefix that carries `token`, or -1."""
        offsets, tokens = self.offsets, self.tokens
        high = offsets[parent + 1]
        if high > self.size:
            high = self.size
        found = bisect_left(tokens, token, offsets[parent], high)
        return found if found < high and tokens[found] == token else -1


class CorpusTables:
    """A prefix trie in flat arrays; level m holds the prefixes of m tokens, from 1 to n.

    ::

        token.m       last token of each prefix, sorted within its parent
        child.m       where a prefix's children start in level m + 1; one entry more than prefixes
        total.m       how often the prefix was followed by anything, pruned continuations included
        next.m        where its continuations start; one entry more than prefixes
        next_token.m  continuations, most frequent first
        next_count.m  how often each came

    The last level has no children. `min_counts` tells for each level below which count
    continuations were left out; it is known where the tables were just counted, and else empty.

    >>> a, b = np.uint16, np.uint32
    >>> tables = CorpusTables.from_arrays({
    ...     "token.1": a([5]), "total.1": b([3]), "next.1": b([0, 1]),
    ...     "next_token.1": a([6]), "next_count.1": b([2]),
    ... })
    >>> tables.step((), 5), tables.continuations(1, 0, 8)
    ((0,), (3, [(6, 2)]))
    """

    def __init__(
        self, arrays: Mapping[str, Array], max_prefix: int, min_counts: Sequence[int]
    ) -> None:
        self.max_prefix = max_prefix
        self.min_counts = tuple(min_counts)
        self._arrays = dict(arrays)
        self._levels = [self._level(length) for length in range(1, max_prefix + 1)]
        self._longer = self._levels[1:]

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], *, min_counts: Sequence[int] = ()
    ) -> CorpusTables:
        """Tables over arrays of any origin; raises ValueError where they can't be tables.

        Looks at names, dtypes, lengths and the ends of offsets only: cheap whatever the size.
        """
        max_prefix = sum(re.fullmatch(r"token\.\d+", name) is not None for name in arrays)
        if not 1 <= max_prefix <= _MAX_PREFIX:
            raise ValueError(
                f"corpus tables must have 1 to {_MAX_PREFIX} levels (got {max_prefix})"
            )
        _check_names(arrays, max_prefix)
        for name, array in arrays.items():
            _check_array(name, array)
        for length in range(1, max_prefix + 1):
            _check_level(arrays, length, max_prefix)
        return cls(arrays, max_prefix, min_counts)

    def arrays(self) -> dict[str, Array]:
        return dict(self._arrays)

    @property
    def num_prefixes(self) -> int:
        return sum(len(level.tokens) for level in self._levels)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def step(self, prefixes: Prefixes, token: int) -> Prefixes:
        """The prefixes that the text ends in one token later; () where there are none.

        Costs one bisection a length.
        """
        found = [self._levels[0].find(0, token)]
        for level, parent in zip(self._longer, prefixes, strict=False):
            found.append(level.find(parent, token) if parent >= 0 else -1)
        return tuple(found) if max(found) >= 0 else ()

    def continuations(
        self, length: int, prefix: int, limit: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """A prefix's total and its (token, count), most frequent first, at most `limit`."""
        level = self._levels[length - 1]
        low = level.starts[prefix]
        high = min(level.starts[prefix + 1], low + limit)
        tokens, counts = level.next_tokens[low:high], level.next_counts[low:high]
        return level.totals[prefix], list(zip(tokens.tolist(), counts.tolist(), strict=True))

    def _level(self, length: int) -> _Level:
        arrays = self._arrays
        root = np.array([0, len(arrays["token.1"])], np.uint32)
        offsets = root if length == 1 else arrays[f"child.{length - 1}"]
        names = ("token", "total", "next", "next_token", "next_count")
        views = [_view(arrays[f"{name}.{length}"]) for name in names]
        return _Level(len(views[0]), _view(offsets), *views)


class CorpusSource(Source):
    """Asks corpus tables; learns nothing. A file can make it guess badly, and no more.

    A tree leaves out the tokens that its model can't read.
    """

    name = "corpus"

    def __init__(self, tables: CorpusTables, top_k: int = 8) -> None:
        self.tables = tables
        self._top_k = top_k

    def open(self, row: RowStart) -> CorpusCursor:
        return CorpusCursor(self, row.prompt_ids)

    def next_tokens(self, prefixes: Prefixes) -> list[Candidate]:
        """The candidates after all prefixes that end here: longest first, then frequency."""
        candidates: dict[int, Evidence] = {}
        for length in range(len(prefixes), 0, -1):
            if prefixes[length - 1] < 0 or len(candidates) == self._top_k:
                continue
            limit = self._top_k + len(candidates)  # Some may be named already.
            total, following = self.tables.continuations(length, prefixes[length - 1], limit)
            for token, count in following:
                if token not in candidates and len(candidates) < self._top_k:
                    candidates[token] = _evidence(length, count, total)
        return list(candidates.items())


class CorpusCursor(Cursor):
    """What the tables know after the end of one row's text."""

    def __init__(self, source: CorpusSource, prompt_ids: Sequence[int]) -> None:
        self._source = source
        self._prefixes: Prefixes = ()
        self._append(prompt_ids)

    def root(self) -> Prefixes:
        return self._prefixes

    def expand(self, state: Prefixes) -> list[Candidate]:
        return self._source.next_tokens(state)

    def follow(self, state: Prefixes, token: int) -> Prefixes | None:
        return self._source.tables.step(state, token) or None

    def observe(self, record: StepRecord) -> None:
        self._append(record.committed_ids)

    def _append(self, token_ids: Sequence[int]) -> None:
        for token in token_ids[-self._source.tables.max_prefix :]:
            self._prefixes = self._source.tables.step(self._prefixes, token)


def _evidence(length: int, count: int, total: int) -> Evidence:
    """Counts as bins: halvings of count / total in whole numbers, and how much it rests on."""
    halvings = ((total - 1) // count).bit_length() - 1 if total > count > 0 else 0
    return _evidence_of(length, 1 + (count >= _SOME) + (count >= _MANY), min(halvings, MAX_BIN))


@lru_cache(maxsize=1024)
def _evidence_of(length: int, bucket: int, probability_bin: int) -> Evidence:
    return Evidence(
        "corpus", match_length=length, count_bin=bucket, probability_bin=probability_bin
    )


def _view(array: Array) -> memoryview:
    """The array as Python reads it fastest; through bytes, for a file aligns it as it likes."""
    if not len(array):
        return memoryview(b"")
    data = array.data.cast("B")
    return data.cast("H") if array.dtype == np.uint16 else data.cast("I")


def _check_names(arrays: Mapping[str, Array], max_prefix: int) -> None:
    kinds = ("token", "child", "total", "next", "next_token", "next_count")
    names = {f"{kind}.{length}" for length in range(1, max_prefix + 1) for kind in kinds}
    names.remove(f"child.{max_prefix}")
    if odd := sorted(names ^ set(arrays)):
        problem = "is missing" if odd[0] in names else "does not belong there"
        raise ValueError(f"corpus tables of {max_prefix} levels: {odd[0]} {problem}")


def _check_array(name: str, array: Array) -> None:
    known = (_UINT16, _UINT32) if name.split(".")[0] in _TOKENS else (_UINT32,)
    if array.dtype not in known:
        names = " or ".join(map(str, known))
        raise ValueError(f"{name} must be of {names} (got {array.dtype})")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be one contiguous row (got shape {array.shape})")


def _check_level(arrays: Mapping[str, Array], length: int, max_prefix: int) -> None:
    """Offsets run from 0 to the end of what they point into."""
    num_prefixes, num_next = (len(arrays[f"{kind}.{length}"]) for kind in ("token", "next_token"))
    sizes = {"total": num_prefixes, "next_count": num_next, "next": num_prefixes + 1}
    ends = {"next": num_next}
    if length < max_prefix:
        sizes["child"], ends["child"] = num_prefixes + 1, len(arrays[f"token.{length + 1}"])
    for kind, size in sizes.items():
        name, array = f"{kind}.{length}", arrays[f"{kind}.{length}"]
        if len(array) != size:
            raise ValueError(f"{name} must have {size} entries (got {len(array)})")
        if kind in ends and (array[0], array[-1]) != (0, ends[kind]):
            got = f"{array[0]} to {array[-1]}"
            raise ValueError(f"{name} must run from 0 to {ends[kind]} (got {got})")
