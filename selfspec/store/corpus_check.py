"""Checks corpus tables in full: the trie must be sorted and complete, the counts sound."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.store.contents import Arrays


def check_corpus(arrays: Arrays, max_prefix: int, num_ids: int) -> None:
    """Reads everything once; raises `ValueError`, which says what must hold at which level."""
    starts = np.zeros(1, np.int64)  # All of level 1 have one parent.
    for level in range(1, max_prefix + 1):
        tokens = arrays[f"token.{level}"]
        _check_ids(f"token.{level}", tokens, num_ids)
        if (_steps_inside(tokens, starts) <= 0).any():
            raise ValueError(f"token.{level} must be sorted below each parent, none twice")
        _check_continuations(arrays, level, num_ids)
        if level < max_prefix:
            starts = arrays[f"child.{level}"].astype(np.int64)
            _check_offsets(f"child.{level}", starts, len(arrays[f"token.{level + 1}"]))


def _check_continuations(arrays: Arrays, level: int, num_ids: int) -> None:
    tokens, counts = arrays[f"next_token.{level}"], arrays[f"next_count.{level}"]
    starts = arrays[f"next.{level}"].astype(np.int64)
    _check_offsets(f"next.{level}", starts, len(tokens))
    _check_ids(f"next_token.{level}", tokens, num_ids)
    if (counts == 0).any():
        raise ValueError(f"next_count.{level} must be >= 1 everywhere")
    rank = -counts.astype(np.int64) * (num_ids + 1) + tokens
    if (_steps_inside(rank, starts) <= 0).any():
        raise ValueError(f"next_token.{level} must have the most frequent first, ties by id")
    sums = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if (sums[starts[1:]] - sums[starts[:-1]] > arrays[f"total.{level}"]).any():
        raise ValueError(f"total.{level} must cover the counts of the continuations")


def _check_ids(name: str, ids: NDArray[Any], num_ids: int) -> None:
    if ids.size and int(ids.max()) >= num_ids:
        raise ValueError(f"{name} must be below {num_ids} (got {ids.max()})")


def _check_offsets(name: str, offsets: NDArray[np.int64], end: int) -> None:
    if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name} must rise from 0 to {end}")


def _steps_inside(values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The differences of neighbours that have the same parent."""
    numbers: NDArray[np.int64] = values.astype(np.int64)
    inside = np.ones(len(values) + 1, bool)
    inside[starts] = False
    return (numbers[1:] - numbers[:-1])[inside[1 : len(values)]]
