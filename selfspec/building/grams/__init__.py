"""Counting n-grams into corpus tables: sorted runs on disk, merged in bounded memory."""

from __future__ import annotations

from selfspec.building.grams.counter import GramCounter
from selfspec.building.grams.merge import merge_tables

__all__ = ["GramCounter", "merge_tables"]
