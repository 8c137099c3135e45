"""Opens a file of a cache folder only if it is a plain file that lies in the folder.

A folder may come from anywhere: a pipe would be waited for, and a device would never end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class LinkError(OSError):
    """A link leads out of the folder."""


def path_inside(folder: Path, name: str) -> Path:
    """The path of the file itself, with links followed; they may not lead out of the folder."""
    real_folder = folder.resolve()
    try:
        path = (real_folder / name).resolve()
    except RuntimeError as error:  # Links may go in a circle.
        raise OSError(0, str(error)) from error
    if not any(path.is_relative_to(root) for root in _roots(real_folder)):
        raise LinkError(0, f"a link to {str(path)!r}")
    return path


def open_plain(path: Path) -> BinaryIO:
    """Opens a file to read, without waiting; raises `OSError` for what is no plain file."""
    # A pipe that is opened with O_NONBLOCK doesn't wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "no plain file")
    return os.fdopen(handle, "rb")


def _roots(folder: Path) -> list[Path]:
    """The folders that its files may lie in: its own, and for a Hub snapshot the Hub's stores.

    Every file of a snapshot is a link into the blobs of the repository, or those of all of them.
    """
    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return [folder]
    return [folder, repository / "blobs", repository.parent / "blobs"]
