"""Which products of a model are faster turned on this machine: measured on first use, and kept.

A product belongs to no model: what was measured for one serves all that have its like.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from selfspec.book import Book
from selfspec.products import NUM_TOKENS, Product, faster_turned, products_of

__all__ = ["Turns"]

_MAX_SECONDS = 2.0  # of a call that finds nothing, shared by its products

Table = Mapping[Product, Collection[int]]


class Turns:
    """What is known of products here. Safe to use from several threads."""

    def __init__(self, book: Book | None = None) -> None:
        self._book = Book("products") if book is None else book
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def table(self, model: nn.Module) -> Table:
        """The products that pay turned, and for how many tokens; empty where none does.

        Takes about 2 seconds where all of a model's products are new.
        """
        found = products_of(model)
        with self._lock:
            numbers = {
                product: self._numbers(product, modules, _MAX_SECONDS / len(found))
                for product, modules in found.items()
            }
        return {product: some for product, some in numbers.items() if some}

    def _numbers(
        self, product: Product, modules: Sequence[nn.Linear], max_seconds: float
    ) -> tuple[int, ...]:
        key = _key(product)
        place = tuple(key.values())
        if place not in self._known:
            kept = self._book.find(key)
            if not _is_valid(kept):
                with torch.no_grad():
                    kept = list(faster_turned(modules, max_seconds=max_seconds))
                self._book.keep(key, kept)
            self._known[place] = tuple(kept)
        return self._known[place]


def _is_valid(kept: Any) -> bool:
    return isinstance(kept, list) and all(number in NUM_TOKENS for number in kept)


def _key(product: Product) -> dict[str, str | int]:
    """All that decides which way is faster."""
    return {
        "product": f"{product.out_features} x {product.in_features}",
        "dtype": str(product.dtype),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
