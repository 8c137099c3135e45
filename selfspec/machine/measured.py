"""What was measured on this machine: one JSON file in the user's cache folder.

A process reads it once, and writes it every five minutes at most, and when it ends. If two
processes write within the same millisecond, one loses what it had measured and measures it again. A
file that can't be read counts as empty. If it can't be written, a warning says so once. Knows keys
and plain values; not what they mean.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from selfspec.machine.user_files import replace_text, user_folder

__all__ = ["Key", "find_measured", "keep_measured"]

_log = logging.getLogger("selfspec")

_FORMAT = 3
_SAVE_SECONDS = 300.0  # Between two saves.
_MAX_ENTRIES = 64  # The oldest are dropped.

Key = Mapping[str, str | int]  # Names and values of everything that a measurement depends on.
_Entries = dict[str, dict[str, Any]]  # The values, by the names of the keys.


def find_measured(key: Key) -> dict[str, Any]:
    """The values kept under exactly this key, also by this process; empty if there are none."""
    file = _file(_path())
    with file.lock:
        return {**file.kept.get(_name(key), {}), **file.new.get(_name(key), {})}


def keep_measured(measured: Iterable[tuple[Key, Mapping[str, Any]]]) -> None:
    """Adds values to those of their keys, and writes the file if five minutes have passed."""
    file = _file(_path())
    with file.lock:
        for key, values in measured:
            file.new[_name(key)] = {**file.new.pop(_name(key), {}), **values}
    if time.monotonic() - file.saved_at >= _SAVE_SECONDS:
        file.save()


class _File:
    """The file as it was read, and what is to be added to it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.kept: _Entries = {} if path is None else _entries(path)
        self.new: _Entries = {}
        self.saved_at = time.monotonic()
        self.lock = threading.Lock()
        atexit.register(self.save)

    def save(self) -> None:
        """Adds what is new to what the file holds now."""
        self.saved_at = time.monotonic()
        if not self.new:
            return
        if self.path is None:
            _warn("you have no home folder")
            return
        try:
            with self.lock:
                entries = _entries(self.path)
                for name, values in self.new.items():
                    entries[name] = {**entries.pop(name, {}), **values}
                self.kept = dict(list(entries.items())[-_MAX_ENTRIES:])
                replace_text(self.path, json.dumps({"format": _FORMAT, "entries": self.kept}))
                self.new = {}
        except OSError as error:
            _warn(f"{self.path}: {error.strerror or error}")


@cache
def _file(path: Path | None) -> _File:
    """The one file of this process; tests have several."""
    return _File(path)


def _path() -> Path | None:
    folder = user_folder()
    return None if folder is None else folder / "measured.json"


def _name(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True)


def _entries(path: Path) -> _Entries:
    """What the file holds."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != _FORMAT:
            return {}
        return {
            name: values for name, values in kept["entries"].items() if isinstance(values, dict)
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


@cache
def _warn(why: str) -> None:
    """Says it once in a process."""
    _log.warning("what was measured on this machine can't be kept for the next process: %s", why)
