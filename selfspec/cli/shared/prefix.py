"""Finds how far two token lists agree."""

from __future__ import annotations

from collections.abc import Sequence


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of their common prefix.

    >>> shared_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which they differ, or None if they are the same.

    >>> first_difference([1, 2], [1, 2, 3])
    2
    """
    shared = shared_length(left, right)
    return shared if shared < max(len(left), len(right)) else None
