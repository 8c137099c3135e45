"""Which files were found to be whole: kept on disk, so that a file is read in full only once.

A file is known by its resolved path, size, times and inode together with the checksum that was
asked for. Whoever can't write the memo checks every time; a damaged memo is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from selfspec.machine.user_files import replace_text, user_folder

__all__ = ["Memo", "memo_path"]

_MAX_ENTRIES = 512
_SETTLED = 2_000_000_000  # ns: a file this fresh could change again within one tick of its clock


def memo_path() -> Path | None:
    """The user's own memo; None where the platform has no place for it."""
    folder = user_folder()
    return None if folder is None else folder / "verified.json"


class Memo:
    """The verdicts of one file on disk; without a path it knows nothing and keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = self._read()

    def knows(self, path: str, stat: os.stat_result, sha256: str) -> bool:
        """Was this very file found to have this checksum?"""
        return self._known.get(path) == _state(stat, sha256)

    def remember(self, path: str, stat: os.stat_result, sha256: str) -> None:
        """Keeps a verdict; of processes that write at once the last wins, and nothing breaks."""
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
