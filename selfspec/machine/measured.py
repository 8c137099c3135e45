"""Measurements of this machine, kept on disk: one file for each key.

A file that can't be read counts as missing. If a file can't be written, the next process measures
again. Knows keys and plain values; not what they mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec.machine.user_files import replace_text, user_folder

__all__ = ["Key", "Measured"]

_FORMAT = 1

Key = Mapping[str, str | int]  # Names and values of everything that a measurement depends on.


class Measured:
    """Measurements in a folder, by default one of that name in the user's cache folder.

    Without a cache folder nothing is kept. Values are found only under exactly the key that they
    were kept with: the file's name is a hash of the key, and the file holds the key.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        ours = user_folder() if folder is None else None
        self._folder = folder if ours is None else ours / name

    def find(self, key: Key) -> Any:
        """The values kept under this key; None if there are none, or the file is damaged."""
        path = self._path(key)
        if path is None:
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["format"] != _FORMAT or _canonical(kept["key"]) != _canonical(key):
                return None
            return kept["values"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def keep(self, key: Key, values: Any) -> None:
        """Replaces the values of this key; of several writers the last one wins."""
        path = self._path(key)
        if path is None:
            return
        kept = {"format": _FORMAT, "key": dict(key), "values": values}
        with contextlib.suppress(OSError):
            replace_text(path, json.dumps(kept, indent=1))

    def _path(self, key: Key) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(_canonical(key).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


def _canonical(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True)
