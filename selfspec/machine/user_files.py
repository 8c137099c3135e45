"""The user's cache folder, and files that are written whole or not at all.

Knows folders and bytes; not what a file holds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from platformdirs import user_cache_path

__all__ = ["replace_text", "replacing", "sync", "user_folder"]


def user_folder() -> Path | None:
    """Our folder in the platform's cache folder; None if the user has no home folder."""
    try:
        folder = user_cache_path("selfspec", appauthor=False)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # Older versions of platformdirs say "~".


@contextmanager
def replacing(path: Path, *, lasting: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end; after an error nothing changed.

    If several processes write at once, the last one wins, and a reader sees one whole file. With
    `lasting` that holds after a crash of the machine too, at the price of waiting for the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            yield file
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    if lasting:
        sync(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replaces a text file as a whole; raises `OSError` if that fails."""
    with replacing(path, lasting=False) as file:
        file.write(text.encode("utf-8"))


def sync(path: Path) -> None:
    """Makes sure that a file, or the names in a folder, are on disk, if the platform can."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
