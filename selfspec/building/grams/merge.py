"""Merges corpus tables: the counts of several become those of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.building.grams.levels import Groups, Levels, Pruning
from selfspec.sources.corpus import CorpusTables

__all__ = ["merge_tables"]

_HALF = 32  # bits of an owner or a token in a pair

Array = NDArray[Any]


class _Sums(NamedTuple):
    """The different pairs of an owner and a token in order, and the sum of what each counted."""

    owners: Array
    tokens: Array
    sums: Array
    places: Array  # of each pair that was given, among the different ones


def merge_tables(
    tables: Sequence[CorpusTables],
    *,
    min_count: int = 1,
    max_continuations: int = 8,
    max_bytes: int = 64_000_000,
) -> CorpusTables:
    """One table with the sums of all counts, whatever their order.

    What one of them had pruned it adds nothing to. The result's `min_counts` tell what it took
    to fit into `max_bytes`.
    """
    lengths = sorted({part.max_prefix for part in tables})
    if len(lengths) != 1:
        raise ValueError(f"tables to merge must have the same max_prefix (got {lengths or 'none'})")
    pruning = Pruning(min_count=min_count, max_continuations=max_continuations, max_bytes=max_bytes)
    arrays = [part.arrays() for part in tables]
    levels = Levels(lengths[0], np.result_type(*(part["token.1"] for part in arrays)), pruning)
    owners = [np.zeros(len(part["token.1"]), np.int64) for part in arrays]
    for length in range(1, lengths[0] + 1):
        prefixes = _add_up(owners, arrays, f"token.{length}", f"total.{length}")
        places = np.split(prefixes.places, np.cumsum([len(part) for part in owners])[:-1])
        levels.add(length, _groups(prefixes, places, arrays, length))
        if length < lengths[0]:
            owners = _owners(places, arrays, f"child.{length}")
    return levels.tables()


def _groups(
    prefixes: _Sums, places: Sequence[Array], arrays: Sequence[dict[str, Array]], length: int
) -> Groups:
    """All tables' prefixes of one length; `places` holds where each table's own are among them."""
    owners = _owners(places, arrays, f"next.{length}")
    following = _add_up(owners, arrays, f"next_token.{length}", f"next_count.{length}")
    ids = np.arange(len(prefixes.tokens))
    sizes = np.bincount(following.owners, minlength=len(ids))
    return Groups(
        ids,
        prefixes.owners,
        prefixes.tokens,
        prefixes.sums,
        sizes,
        following.tokens,
        following.sums,
    )


def _owners(
    places: Sequence[Array], arrays: Sequence[dict[str, Array]], offsets: str
) -> list[Array]:
    """For each child or continuation of each table, the place of the prefix it belongs to."""
    return [np.repeat(own, _sizes(part[offsets])) for own, part in zip(places, arrays, strict=True)]


def _sizes(offsets: Array) -> Array:
    return offsets[1:].astype(np.int64) - offsets[:-1]


def _add_up(
    owners: Sequence[Array], arrays: Sequence[dict[str, Array]], tokens: str, counts: str
) -> _Sums:
    """Joins what all tables count under the same owner and token."""
    token = np.concatenate([part[tokens] for part in arrays]).astype(np.int64)
    count = np.concatenate([part[counts] for part in arrays]).astype(np.int64)
    pairs = (np.concatenate(owners) << _HALF) | token
    different, places = np.unique(pairs, return_inverse=True)
    sums = np.zeros(len(different), np.int64)
    np.add.at(sums, places, count)
    return _Sums(different >> _HALF, different & ((1 << _HALF) - 1), sums, places)
