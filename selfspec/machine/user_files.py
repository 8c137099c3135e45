"""The user's cache folder, and files that are written whole or not at all.

Knows folders and bytes; not what a file holds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

__all__ = ["replace_text", "user_folder"]


def user_folder() -> Path | None:
    """Our folder in the platform's cache folder; None if the user has no home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else _platform_folder()
    except RuntimeError:  # The user has no home folder.
        return None
    return base / "selfspec"


def _platform_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def replace_text(path: Path, text: str) -> None:
    """Replaces a file as a whole; raises `OSError` if that fails.

    If several processes write at once, the last one wins, and a reader sees one whole file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
