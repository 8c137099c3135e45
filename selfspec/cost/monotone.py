"""The never falling values that are nearest to some values."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["monotone"]


def monotone(values: Sequence[float]) -> list[float]:
    """The never falling values that are nearest by least squares (pool adjacent violators).

    >>> monotone([1.0, 3.0, 2.0, 4.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[tuple[float, int]] = []  # The mean, and of how many values.
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            left, more = pools.pop()
            mean = (mean * count + left * more) / (count + more)
            count += more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
