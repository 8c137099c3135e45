"""Parts of a build that somebody else does: what goes out, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from selfspec.building.documents import Document, in_parts

# Calls a method of `BuildWorker`, which is named first, with each of the jobs. Gives each job with
# its result in the order of the jobs, whoever did it.
CallWorkers = Callable[[str, Iterable[Any]], Iterator[tuple[Any, Any]]]

# A shard holds some million tokens. More: fewer runs to merge, but more that a worker's end costs.
_CHARACTERS = 1 << 22
_DOCUMENTS = 1 << 14


class CountedShard(NamedTuple):
    """The n-grams of some documents that follow each other."""

    documents: int
    tokens: int
    empty: int  # Documents in which nothing was found.
    runs: list[bytes]  # Files as `GramCounter` writes them.


def shards_of(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in order, as many together as are worth being sent."""
    return in_parts(documents, _DOCUMENTS, _CHARACTERS)
