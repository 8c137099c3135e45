"""Finds the most frequent n-grams of a cache and the surest rows of its LUTs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from selfspec.cache import KEY_OF, Arrays, CacheContents
from selfspec.draft.sources.corpus import CorpusTables


class Entry(NamedTuple):
    """What follows some tokens, and how often or how likely."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    weight: str


def top_entries(contents: CacheContents, limit: int) -> Iterator[tuple[str, list[Entry]]]:
    """For each table its title and its first entries."""
    if contents.corpus is not None:
        for length in range(1, contents.corpus.max_prefix + 1):
            title = f"most frequent behind {length} token{'s' if length > 1 else ''}"
            yield title, _most_frequent(contents.corpus, length, limit)
    for source in KEY_OF:
        if source in contents.tables:
            yield f"surest of {source}", _surest(KEY_OF[source], contents.tables[source], limit)


def _most_frequent(tables: CorpusTables, length: int, limit: int) -> list[Entry]:
    arrays = tables.arrays()
    tokens, counts = arrays[f"next_token.{length}"], arrays[f"next_count.{length}"]
    indices = np.argsort(-counts.astype(np.int64), kind="stable")[:limit].tolist()
    return [
        Entry(
            _prefix(arrays, length, _owner(arrays[f"next.{length}"], index)),
            (int(tokens[index]),),
            f"{counts[index]:,} times",
        )
        for index in indices
    ]


def _prefix(arrays: Arrays, length: int, index: int) -> tuple[int, ...]:
    """All tokens of a prefix, from its last one upwards."""
    tokens = [int(arrays[f"token.{length}"][index])]
    for above in range(length - 1, 0, -1):
        index = _owner(arrays[f"child.{above}"], index)
        tokens.append(int(arrays[f"token.{above}"][index]))
    return tuple(reversed(tokens))


def _owner(offsets: np.ndarray, index: int) -> int:
    """Whose span of the offsets an index lies in."""
    return int(np.searchsorted(offsets, index, side="right")) - 1


def _surest(key: str, arrays: Arrays, limit: int) -> list[Entry]:
    if not arrays["ids"].size:
        return []
    indices = np.argsort(-arrays["probabilities"][:, 0], kind="stable")[:limit].tolist()
    return [_row(arrays[key][index].reshape(-1).tolist(), arrays, index) for index in indices]


def _row(before: Sequence[int], arrays: Arrays, index: int) -> Entry:
    after = tuple(id_ for id_ in arrays["ids"][index].tolist() if id_ >= 0)
    return Entry(tuple(before), after, f"{arrays['probabilities'][index, 0]:.0%}")
