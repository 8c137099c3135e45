"""Replaces a folder by a finished one at once: a reader sees the old one, the new one, or none.

If the platform can exchange two folders in one step, it does. Otherwise the old folder is moved
aside first, and for a moment there is none.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from selfspec.machine.user_files import sync

_NEW, _OLD = "new", "old"


@contextmanager
def scratch_folder(target: Path, mode: int = 0o777) -> Iterator[Path]:
    """An empty folder beside `target` for one writer; it is removed afterwards in any case."""
    folder = _sibling(target, _NEW)
    folder.mkdir(mode=mode, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(new: Path, target: Path, *, overwrite: bool) -> None:
    """Renames `new` to `target`. Raises `FileExistsError` if that exists and must stay.

    Of several writers the last one wins, and what the others wrote is removed.
    """
    aside = []
    while not _renamed(new, target):
        if not overwrite:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        if _exchange(new, target):
            break
        aside.append(_move_aside(target))
    sync(target.parent)
    for folder in aside:
        shutil.rmtree(folder, ignore_errors=True)


def clear_remnants(target: Path) -> None:
    """Removes what killed writers left beside `target`, when no other writer is at work.

    If one was killed between its two renames, the old folder is put back.
    """
    for folder in target.parent.glob(f".{glob.escape(target.name)}.*"):
        if folder.suffix == f".{_OLD}" and not target.exists():
            folder.rename(target)
        elif folder.suffix in (f".{_OLD}", f".{_NEW}"):
            shutil.rmtree(folder, ignore_errors=True)


def is_being_swapped(target: Path) -> bool:
    """Has a writer moved the old folder aside and not yet renamed the new one?"""
    start, end = f".{target.name}.", f".{_OLD}"
    names = os.listdir(target.parent) if target.parent.is_dir() else []
    return any(name.startswith(start) and name.endswith(end) for name in names)


def _sibling(target: Path, role: str) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(6)}.{role}"


def _renamed(new: Path, target: Path) -> bool:
    """Tries to rename to a path that is free; an empty folder counts as free."""
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
    with suppress(FileNotFoundError):  # Another writer was first.
        target.rename(old)
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders in one step; False if the system can't do it, or if one is gone."""
    call = _exchange_call()
    return call is not None and call(os.fsencode(one), os.fsencode(other)) == 0


def _exchange_call() -> Callable[[bytes, bytes], int] | None:
    """The system's call to swap two paths, which returns 0 on success."""
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return lambda one, other: libc.renameat2(here, one, here, other, exchange)
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        swap = 2  # RENAME_SWAP
        return lambda one, other: libc.renamex_np(one, other, swap)
    return None
