"""Cost curves on disk: one file for each model, device and situation that was measured.

What can't be read counts as none, and what can't be written is measured again next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from selfspec.cost.curve import CostCurve
from selfspec.user_files import replace_text, user_folder

__all__ = ["CostBook", "Key"]

_FORMAT = 1

Key = Mapping[str, str | int]  # all that the cost depends on, by name


class CostBook:
    """Curves in a folder, by default the user's own; without a folder it knows and keeps nothing.

    A curve is found only under the very key that it was kept with: the file's name is a hash of
    the key, and the key is in the file.
    """

    def __init__(self, folder: Path | None = None) -> None:
        ours = user_folder() if folder is None else None
        self._folder = folder if ours is None else ours / "costs"

    def find(self, key: Key) -> CostCurve | None:
        """The curve kept under this key; None where there is none that can be used."""
        path = self._path(key)
        if path is None:
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["format"] != _FORMAT or _canonical(kept["key"]) != _canonical(key):
                return None
            return CostCurve.from_dict(kept["curve"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def keep(self, key: Key, curve: CostCurve) -> None:
        """Puts a curve in the place of an earlier one; of several writers the last one wins."""
        path = self._path(key)
        if path is None:
            return
        kept = {"format": _FORMAT, "key": dict(key), "curve": curve.as_dict()}
        with contextlib.suppress(OSError):
            replace_text(path, json.dumps(kept, indent=1))

    def _path(self, key: Key) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(_canonical(key).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


def _canonical(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True)
