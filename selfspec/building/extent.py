"""Tells how many documents there will be, for the bars, where that is quick to find out."""

from __future__ import annotations

from pathlib import Path

from selfspec.building.inputs import Inputs
from selfspec.building.plain import PACKED, PIECE
from selfspec.building.recipe import Recipe

_BLOCK = 1 << 20


def num_documents(recipe: Recipe, inputs: Inputs) -> int | None:
    """The number of documents or an estimate; None if all of them would have to be read."""
    counts = [_in_file(path, inputs.kind, recipe.form) for path in inputs.files]
    known = None if None in counts or not counts else sum(count or 0 for count in counts)
    limits = [each for each in (known, recipe.max_documents) if each is not None]
    return min(limits, default=None)


def _in_file(path: Path, kind: str, form: str) -> int | None:
    if kind == "parquet":
        from pyarrow.parquet import read_metadata

        return int(read_metadata(path).num_rows)
    if path.suffix in PACKED or path.suffix == ".zst" or kind == "arrow":
        return None
    if kind == "text" and form == "document":
        return path.stat().st_size // PIECE + 1
    if kind == "text" and form == "paragraph":
        return None
    return _num_lines(path)


def _num_lines(path: Path) -> int | None:
    """The number of lines; None for JSON that is one list, or that is all on one line."""
    num_lines = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            if not num_lines and block.lstrip()[:1] == b"[":
                return None
            num_lines += block.count(b"\n")
    return num_lines or None
