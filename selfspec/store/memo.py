"""Remembers on disk which files were found to be whole, so that each is read in full only once.

A file is known by its resolved path, size, times and inode, together with the checksum that it
must have. If the memo can't be written, files are checked every time; a damaged one is ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from selfspec.machine.user_files import replace_text, user_folder

_MAX_ENTRIES = 512
_SETTLED = 2_000_000_000  # In ns. A younger file could change again within one tick of the clock.


def memo_path() -> Path | None:
    """The path of the user's own memo; None if the platform has no folder for it."""
    folder = user_folder()
    return None if folder is None else folder / "verified.json"


class Memo:
    """The verdicts in one file on disk; without a path it knows nothing and keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = self._read()

    def knows(self, path: str, stat: os.stat_result, sha256: str) -> bool:
        """Was this very file found to have this checksum?"""
        return self._known.get(path) == _state(stat, sha256)

    def remember(self, path: str, stat: os.stat_result, sha256: str) -> None:
        """Keeps a verdict; if several processes write at once, the last one wins."""
        if self._path is None or time.time_ns() - stat.st_mtime_ns < _SETTLED:
            return
        entries = self._read()
        entries.pop(path, None)
        entries[path] = _state(stat, sha256)
        kept = dict(list(entries.items())[-_MAX_ENTRIES:])
        with contextlib.suppress(OSError):
            replace_text(self._path, json.dumps(kept))

    def _read(self) -> dict[str, object]:
        if self._path is None:
            return {}
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return entries if isinstance(entries, dict) else {}


def _state(stat: os.stat_result, sha256: str) -> list[object]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, sha256]
