"""How a model's products are computed fastest on this machine: measured on first use, and kept.

A product belongs to no model: what was measured for one serves all that have its like.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from selfspec.book import Book
from selfspec.hardware import processor
from selfspec.packed import Group, settles
from selfspec.products import (
    LINEAR,
    NUM_TOKENS,
    Product,
    Products,
    Table,
    best_ways,
    has_native,
    seconds_by_way,
)

__all__ = ["Turns"]

_MAX_SECONDS = 3.0  # of a call that finds nothing, shared by its products

_Seconds = Mapping[str, Sequence[float]]


class Turns:
    """What is known of products here. Safe to use from several threads."""

    def __init__(self, book: Book | None = None) -> None:
        self._book = Book("products") if book is None else book
        self._known: dict[tuple[Any, ...], _Seconds] = {}
        self._lock = threading.Lock()

    def table(self, found: Products, allowed: Collection[str], *, settled: bool = False) -> Table:
        """The best of the ways that are allowed, of products for which it is not `LINEAR` alone.

        `settled`: of those that come to stock's bits, where there are some in half precision.
        Takes about 3 seconds where all of a model's products are new.
        """
        with self._lock:
            ways = {
                product: best_ways(
                    self._seconds(
                        product,
                        groups,
                        settled=settled and settles(product.dtype),
                        max_seconds=_MAX_SECONDS / len(found),
                    ),
                    allowed,
                )
                for product, groups in found.items()
            }
        return {product: names for product, names in ways.items() if set(names) - {LINEAR}}

    def _seconds(
        self, product: Product, groups: Sequence[Group], *, settled: bool, max_seconds: float
    ) -> _Seconds:
        key = _key(product, settled)
        place = tuple(key.values())
        if place not in self._known:
            kept = self._book.find(key)
            if not _is_valid(kept):
                with torch.no_grad():
                    kept = seconds_by_way(groups, max_seconds=max_seconds, settled=settled)
                self._book.keep(key, kept)
            self._known[place] = kept
        return self._known[place]


def _is_valid(kept: Any) -> bool:
    return (
        isinstance(kept, dict)
        and LINEAR in kept
        and all(
            isinstance(seconds, (list, tuple))
            and len(seconds) == len(NUM_TOKENS)
            and all(isinstance(each, (int, float)) for each in seconds)
            for seconds in kept.values()
        )
    )


def _key(product: Product, settled: bool) -> dict[str, str | int]:
    """All that decides which way is faster."""
    return {
        "product": f"{'+'.join(map(str, product.out_features))} x {product.in_features}",
        "dtype": str(product.dtype),
        "settled": settled,
        "native": has_native(product.dtype, product.in_features),
        "processor": processor(),
        "cpus": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
