"""What was measured on this machine: one JSON file in the user's cache folder.

A file that can't be read counts as empty. If the file can't be written, there is one warning, and
each process measures anew. Knows keys and plain values; not what they mean.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from selfspec.machine.user_files import replace_text, user_folder

__all__ = ["Key", "find_measured", "keep_measured"]

_log = logging.getLogger("selfspec")

_FORMAT = 2
# Other programs may have kept the machine busy, so measurements are used for some days only.
_MAX_DAYS = 3
_MAX_ENTRIES = 64  # Those kept first are dropped: calls read and write the whole file.
_PATIENCE = 1.0  # In seconds, for other processes that write.

Key = Mapping[str, str | int]  # Names and values of everything that a measurement depends on.


def find_measured(key: Key) -> dict[str, Any]:
    """The values kept under exactly this key in the last days; empty if there are none."""
    path = _path()
    return {} if path is None else dict(_entries(path).get(_name(key), {}).get("values", {}))


def keep_measured(measured: Iterable[tuple[Key, Mapping[str, Any]]]) -> None:
    """Adds values to those of their keys; of several writers of a value, the last one wins."""
    path = _path()
    if path is None:
        _warn("you have no home folder")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_PATIENCE):
            entries = _entries(path)
            for key, values in measured:
                known = entries.pop(_name(key), {"values": {}})["values"]
                entries[_name(key)] = {"date": str(date.today()), "values": {**known, **values}}
            kept = dict(list(entries.items())[-_MAX_ENTRIES:])
            replace_text(path, json.dumps({"format": _FORMAT, "entries": kept}))
    except TimeoutError:  # A later call keeps it.
        _log.info("%s is in use, so nothing was added to it", path)
    except (NotImplementedError, OSError) as error:
        _warn(f"{path}: {getattr(error, 'strerror', None) or error}")


def _path() -> Path | None:
    folder = user_folder()
    return None if folder is None else folder / "measured.json"


def _name(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True)


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """What the file holds and is not too old, by the names of the keys."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != _FORMAT:
            return {}
        days = {str(date.today() - timedelta(each)) for each in range(_MAX_DAYS + 1)}
        return {
            name: entry
            for name, entry in kept["entries"].items()
            if entry["date"] in days and isinstance(entry["values"], dict)
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


@cache
def _warn(why: str) -> None:
    """Warns once in a process, and not after each call."""
    _log.warning("what was measured on this machine can't be kept for the next process: %s", why)
