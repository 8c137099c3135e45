"""Opens a file of a cache folder only if it is the one that the card describes.

A folder may come from anywhere: a pipe would be waited for, and a device would never end. Size and
checksum are taken from the open file. So what was checked is what is read, even if the folder is
replaced meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from selfspec.errors import CacheChecksumError, CacheFileError, CachePathError, CacheSizeError
from selfspec.store.memo import Memo

_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """The checksum and the size that a file must have."""

    sha256: str
    size: int


def entry_of(path: Path) -> FileEntry:
    """The checksum and the size of a file."""
    with path.open("rb") as file:
        return FileEntry(_sha256(file), path.stat().st_size)


def open_inside(folder: Path, name: str) -> tuple[Path, BinaryIO]:
    """Opens a plain file to read, without waiting; also gives its path with links followed.

    Links may not lead out of the folder. Raises `OSError` for what is no plain file.
    """
    real_folder = folder.resolve()
    try:
        path = (real_folder / name).resolve()
    except RuntimeError as error:  # Links may go in a circle.
        raise OSError(0, str(error)) from error
    if not any(path.is_relative_to(root) for root in _roots(real_folder)):
        raise CachePathError(
            f"{name} of cache {str(folder)!r} must lie in that folder (got a link to "
            f"{str(path)!r}); put the file itself there"
        )
    # A pipe that is opened with O_NONBLOCK doesn't wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "no plain file")
    return path, os.fdopen(handle, "rb")


@contextmanager
def opened(folder: Path, name: str, entry: FileEntry, memo: Memo) -> Iterator[BinaryIO]:
    """Opens and checks the file; its checksum is not taken again if the memo knows the file."""
    where = f"cache {str(folder)!r}"
    try:
        path, stream = open_inside(folder, name)
    except OSError as error:
        raise CacheFileError(
            f"{where} must hold the file {name} that its card names (got: {error.strerror}); "
            "fetch or build it anew"
        ) from error
    with stream as file:
        found = os.fstat(file.fileno())
        if found.st_size != entry.size:
            how = "cut off" if found.st_size < entry.size else "grown"
            raise CacheSizeError(
                f"{name} of {where} must have {entry.size} bytes (got {found.st_size}: it was "
                f"{how}); fetch or build it anew"
            )
        if not memo.knows(str(path), found, entry.sha256):
            if (sha256 := _sha256(file)) != entry.sha256:
                raise CacheChecksumError(
                    f"{name} of {where} must have the sha256 {entry.sha256[:12]}… (got "
                    f"{sha256[:12]}…: it was changed or damaged); fetch or build it anew"
                )
            if os.fstat(file.fileno()).st_mtime_ns == found.st_mtime_ns:
                memo.remember(str(path), found, entry.sha256)
        file.seek(0)
        yield file


def _roots(folder: Path) -> list[Path]:
    """The folders that its files may lie in: its own, and for a Hub snapshot the Hub's stores.

    Every file of a snapshot is a link into the blobs of the repository, or those of all of them.
    """
    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return [folder]
    return [folder, repository / "blobs", repository.parent / "blobs"]


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
