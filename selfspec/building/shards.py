"""Parts of a build that somebody else does: what goes out, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from selfspec.building.documents import Document

# Has a method of `Hands`, named first, called with each of the jobs. Gives each job with its result
# in the order of the jobs, whoever did it.
Spread = Callable[[str, Iterable[Any]], Iterator[tuple[Any, Any]]]

# A shard holds some million tokens. More: fewer runs to merge, but more that a worker's end costs.
_CHARACTERS = 1 << 22
_DOCUMENTS = 1 << 14


class CountedShard(NamedTuple):
    """The n-grams of some documents that follow each other."""

    documents: int
    tokens: int
    empty: int  # Documents in which nothing was found.
    runs: list[bytes]  # Files as `GramCounter` writes them.


def counted(spread: Spread, shards: Iterable[list[Document]]) -> Iterator[CountedShard]:
    """What others count in each shard."""
    for _, result in spread("count", shards):
        yield result


def shards_of(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in order, as many together as are worth being sent."""
    shard: list[Document] = []
    size = 0
    for document in documents:
        shard.append(document)
        size += _size(document)
        if size > _CHARACTERS or len(shard) == _DOCUMENTS:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _size(document: Document) -> int:
    if isinstance(document, list):
        return sum(len(message["content"]) for message in document)
    return len(document or "")
