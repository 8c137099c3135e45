"""Puts a finished folder in its place at once: a reader sees the old one, the new one, or none.

Where the platform can exchange two folders in one step it does; elsewhere the old one is moved
aside first, and for that moment there is none.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["is_being_swapped", "put_in_place", "scratch_folder", "sync_folder"]

_NEW, _OLD = "new", "old"


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, for one writer alone; gone afterwards, come what may."""
    folder = _sibling(target, _NEW)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(new: Path, target: Path, *, overwrite: bool) -> None:
    """Renames `new` to `target`. Raises `FileExistsError` where that is taken and must stay.

    Of several writers the last one wins, and what the others wrote is removed.
    """
    aside = []
    while not _renamed(new, target):
        if not overwrite:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        if _exchange(new, target):
            break
        aside.append(_move_aside(target))
    sync_folder(target.parent)
    for folder in aside:
        shutil.rmtree(folder, ignore_errors=True)


def is_being_swapped(target: Path) -> bool:
    """Is a writer between moving the old folder aside and putting the new one in its place?"""
    start, end = f".{target.name}.", f".{_OLD}"
    names = os.listdir(target.parent) if target.parent.is_dir() else []
    return any(name.startswith(start) and name.endswith(end) for name in names)


def sync_folder(folder: Path) -> None:
    """Makes sure that the names in a folder are on disk, where the platform lets one ask."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sibling(target: Path, role: str) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(6)}.{role}"


def _renamed(new: Path, target: Path) -> bool:
    """Tries to take a place that is free; an empty folder counts as free."""
    try:
        if os.name == "nt" and target.is_dir():
            target.rmdir()
        new.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _move_aside(target: Path) -> Path:
    old = _sibling(target, _OLD)
    with suppress(FileNotFoundError):  # another writer was first
        target.rename(old)
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders in one step; False where system or file system can't, or one is gone."""
    call = _exchange_call()
    return call is not None and call(os.fsencode(one), os.fsencode(other)) == 0


def _exchange_call() -> Callable[[bytes, bytes], int] | None:
    """The system's own call, 0 on success."""
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return lambda one, other: libc.renameat2(here, one, here, other, exchange)
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        swap = 2  # RENAME_SWAP
        return lambda one, other: libc.renamex_np(one, other, swap)
    return None
