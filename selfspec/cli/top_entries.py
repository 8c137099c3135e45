"""The entries of a cache that stand out: n-grams that came most often, surest rows of the LUTs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from selfspec.draft.sources.corpus import CorpusTables
from selfspec.store import KEY_OF, Arrays, CacheContents

__all__ = ["Entry", "top_entries"]


class Entry(NamedTuple):
    """What comes behind some tokens, and how often or how likely."""

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
    places = np.argsort(-counts.astype(np.int64), kind="stable")[:limit].tolist()
    return [
        Entry(
            _prefix(arrays, length, _owner(arrays[f"next.{length}"], place)),
            (int(tokens[place]),),
            f"{counts[place]:,} times",
        )
        for place in places
    ]


def _prefix(arrays: Arrays, length: int, place: int) -> tuple[int, ...]:
    """All tokens of a prefix, from its last one upwards."""
    tokens = [int(arrays[f"token.{length}"][place])]
    for above in range(length - 1, 0, -1):
        place = _owner(arrays[f"child.{above}"], place)
        tokens.append(int(arrays[f"token.{above}"][place]))
    return tuple(reversed(tokens))


def _owner(offsets: np.ndarray, place: int) -> int:
    """Whose span of the offsets a place lies in."""
    return int(np.searchsorted(offsets, place, side="right")) - 1


def _surest(key: str, arrays: Arrays, limit: int) -> list[Entry]:
    if not arrays["ids"].size:
        return []
    places = np.argsort(-arrays["probabilities"][:, 0], kind="stable")[:limit].tolist()
    return [_row(arrays[key][place].reshape(-1).tolist(), arrays, place) for place in places]


def _row(before: Sequence[int], arrays: Arrays, place: int) -> Entry:
    after = tuple(id_ for id_ in arrays["ids"][place].tolist() if id_ >= 0)
    return Entry(tuple(before), after, f"{arrays['probabilities'][place, 0]:.0%}")
