"""What was measured on this machine, on disk: one file for each thing and situation.

What can't be read counts as none, and what can't be written is measured again next time. Knows
keys and plain values; not what they mean.
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

Key = Mapping[str, str | int]  # all that the values depend on, by name


class Measured:
    """Values in a folder, by default the user's own of that name; without one it keeps nothing.

    They are found only under the very key that they were kept with: the file's name is a hash of
    the key, and the key is in the file.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        ours = user_folder() if folder is None else None
        self._folder = folder if ours is None else ours / name

    def find(self, key: Key) -> Any:
        """What was kept under this key; None where there is nothing that can be used."""
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
        """Puts values in the place of earlier ones; of several writers the last one wins."""
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
