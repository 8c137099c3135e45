"""The user's cache folder, and files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from platformdirs import user_cache_path


def user_folder() -> Path | None:
    """Our folder in the platform's cache folder; None if the user has no home folder."""
    try:
        folder = user_cache_path("selfspec", appauthor=False)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # Older versions of platformdirs say "~".


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that is renamed to `path` at the end; raises `OSError` if that fails.

    Readers see the old file or the new one, also after the machine has crashed, and of several
    writers the last one wins. A writer that is killed leaves a hidden ``.tmp`` file. A new file
    gets `mode`, subject to the umask; one that is replaced keeps what `mode` allows of its own.
    """
    kept = path.stat().st_mode & mode if path.exists() else None
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        first = mode if kept is None else kept
        with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, first)) as file:
            if kept is not None:
                os.chmod(scratch, kept)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def locked(lock: Path, *, max_wait: float = 0.0, mode: int = 0o644) -> Iterator[None]:
    """Keeps other processes out by a file that stays.

    Raises `TimeoutError` if another process has had it for longer than `max_wait` seconds, and any
    other `OSError` if the file can't be made.
    """
    from filelock import FileLock

    try:
        taken = FileLock(lock, timeout=max_wait, mode=mode).acquire()
    except TimeoutError:  # filelock raises it too where it can't open the file.
        lock.open("ab").close()
        raise
    with taken:
        yield


def remove_scratch(folder: Path, name: str = "*") -> None:
    """Removes what killed writers left of files of this name. Lock out all others before."""
    for left in folder.glob(f".{name}.*.tmp"):
        left.unlink(missing_ok=True)


def replace_bytes(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """The same for a file that is in memory."""
    with replacing(path, mode=mode) as file:
        file.write(data)
