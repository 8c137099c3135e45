"""Opens a file of a cache folder only if it is the one that the card describes.

Size and checksum are taken from the open file. So what was checked is what is read, even if the
folder is replaced meanwhile.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from selfspec.errors import CacheChecksumError, CacheFileError, CachePathError, CacheSizeError
from selfspec.store.card import FileEntry
from selfspec.store.memo import Memo
from selfspec.store.plain_files import LinkError, open_plain, path_inside

_CHUNK = 1 << 20


def entry_of(path: Path) -> FileEntry:
    """The checksum and the size of a file."""
    with path.open("rb") as file:
        return FileEntry(_sha256(file), path.stat().st_size)


@contextmanager
def opened(folder: Path, name: str, entry: FileEntry, memo: Memo) -> Iterator[BinaryIO]:
    """Opens and checks the file; its checksum is not taken again if the memo knows the file."""
    path, stream = _open(folder, name)
    with stream as file:
        found = os.fstat(file.fileno())
        _check_size(folder, name, entry, found.st_size)
        if not memo.knows(str(path), found, entry.sha256):
            _check_sum(folder, name, entry, file)
            if os.fstat(file.fileno()).st_mtime_ns == found.st_mtime_ns:
                memo.remember(str(path), found, entry.sha256)
        file.seek(0)
        yield file


def _open(folder: Path, name: str) -> tuple[Path, BinaryIO]:
    try:
        path = path_inside(folder, name)
        return path, open_plain(path)
    except LinkError as error:
        raise CachePathError(
            f"{name} of cache {str(folder)!r} must lie in that folder (got {error.strerror}); put "
            "the file itself there"
        ) from error
    except OSError as error:
        raise _missing(folder, name, error.strerror) from error


def _missing(folder: Path, name: str, got: object) -> CacheFileError:
    return CacheFileError(
        f"cache {str(folder)!r} must hold the file {name} that its card names (got: {got}); "
        "fetch or build it anew"
    )


def _check_size(folder: Path, name: str, entry: FileEntry, size: int) -> None:
    if size != entry.size:
        how = "cut off" if size < entry.size else "grown"
        raise CacheSizeError(
            f"{name} of cache {str(folder)!r} must have {entry.size} bytes (got {size}: it was "
            f"{how}); fetch or build it anew"
        )


def _check_sum(folder: Path, name: str, entry: FileEntry, file: BinaryIO) -> None:
    found = _sha256(file)
    if found != entry.sha256:
        raise CacheChecksumError(
            f"{name} of cache {str(folder)!r} must have the sha256 {entry.sha256[:12]}… "
            f"(got {found[:12]}…: it was changed or damaged); fetch or build it anew"
        )


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
