"""Merges corpus tables: the counts of several become those of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.building.grams.levels import Groups, Levels
from selfspec.draft.sources.corpus import CorpusTables

_HALF = 32  # The bits of an owner, and of a token, in a pair.

Array = NDArray[Any]


class _Sums(NamedTuple):
    """The different pairs of an owner and a token in order, and the sum of what each counted."""

    owners: Array
    tokens: Array
    sums: Array
    indices: Array  # For each pair given, its index among the different ones.


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
    levels = Levels(lengths[0], token_dtype, min_count, max_continuations, max_bytes)
    owners = [np.zeros(len(part["token.1"]), np.int64) for part in arrays]
    for length in range(1, lengths[0] + 1):
        prefixes = _add_up(owners, arrays, f"token.{length}", f"total.{length}")
        indices = np.split(prefixes.indices, np.cumsum([len(part) for part in owners])[:-1])
        levels.add(length, _groups(prefixes, indices, arrays, length))
        if length < lengths[0]:
            owners = _owners(indices, arrays, f"child.{length}")
    return levels.tables()


def _groups(
    prefixes: _Sums, indices: Sequence[Array], arrays: Sequence[dict[str, Array]], length: int
) -> Groups:
    """All tables' prefixes of one length; `indices` says where those of each table went."""
    owners = _owners(indices, arrays, f"next.{length}")
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
    indices: Sequence[Array], arrays: Sequence[dict[str, Array]], offsets: str
) -> list[Array]:
    """For each child or continuation of each table, the index of the prefix it belongs to."""
    spans = [part[offsets].astype(np.int64) for part in arrays]
    return [np.repeat(own, span[1:] - span[:-1]) for own, span in zip(indices, spans, strict=True)]


def _add_up(
    owners: Sequence[Array], arrays: Sequence[dict[str, Array]], tokens: str, counts: str
) -> _Sums:
    """Joins what all tables count under the same owner and token."""
    token = np.concatenate([part[tokens] for part in arrays]).astype(np.int64)
    count = np.concatenate([part[counts] for part in arrays]).astype(np.int64)
    pairs = (np.concatenate(owners) << _HALF) | token
    different, indices = np.unique(pairs, return_inverse=True)
    sums = np.zeros(len(different), np.int64)
    np.add.at(sums, indices, count)
    return _Sums(different >> _HALF, different & ((1 << _HALF) - 1), sums, indices)
