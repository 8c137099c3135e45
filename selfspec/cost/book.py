"""Cost curves on disk: one file for each model, device and situation that was measured."""

from __future__ import annotations

from pathlib import Path

from selfspec.book import Book, Key
from selfspec.cost.curve import CostCurve

__all__ = ["CostBook"]


class CostBook:
    """Curves in a folder, by default the user's own."""

    def __init__(self, folder: Path | None = None) -> None:
        self._book = Book("costs", folder)

    def find(self, key: Key) -> CostCurve | None:
        """The curve kept under this key; None where there is none that can be used."""
        try:
            return CostCurve.from_dict(self._book.find(key))
        except ValueError:
            return None

    def keep(self, key: Key, curve: CostCurve) -> None:
        """Puts a curve in the place of an earlier one."""
        self._book.keep(key, curve.as_dict())
