"""Reads plain text files, packed or not, piece by piece as documents.

A file that is not text gives no documents, since a folder of sources may hold pictures too.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from selfspec.errors import BuildError

PACKED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

PIECE = 1 << 20  # Characters. Longer text is cut into several documents at ends of lines.
_BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error)


def read_plain(path: Path, form: str) -> Iterator[str]:
    """The documents of one file: all of it, its lines, or its paragraphs.

    Bytes that are not UTF-8 become replacement characters. It holds one piece in memory, however
    large the file is.
    """
    forms = {"document": _pieces, "line": _lines, "paragraph": _paragraphs}
    opened = PACKED.get(path.suffix.lower(), open)
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as stream:
            if "\0" not in stream.read(4096):
                stream.seek(0)
                yield from forms[form](stream)
    except _BROKEN as error:
        raise BuildError(f"data file {str(path)!r} can't be read: {error}") from error


def _pieces(stream: TextIO) -> Iterator[str]:
    while piece := stream.read(PIECE):
        yield piece + stream.readline(PIECE - 1)


def _lines(stream: TextIO) -> Iterator[str]:
    while line := stream.readline(PIECE):
        yield line.rstrip("\n")


def _paragraphs(stream: TextIO) -> Iterator[str]:
    lines: list[str] = []
    length = 0
    while line := stream.readline(PIECE):
        if (not line.strip() or length > PIECE) and lines:
            yield "".join(lines)
            lines, length = [], 0
        if line.strip():
            lines.append(line)
            length += len(line)
    if lines:
        yield "".join(lines)
