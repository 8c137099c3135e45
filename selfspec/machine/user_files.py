"""Where files go that can be made again, and how one is written whole or not at all.

Knows folders and bytes; not what a file holds, nor whose it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

__all__ = ["replace_text", "user_folder"]


def user_folder() -> Path | None:
    """Ours, where the platform keeps what can be made again; None where there is no such place."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else _platform_folder()
    except RuntimeError:  # nobody knows a home
        return None
    return base / "selfspec"


def _platform_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def replace_text(path: Path, text: str) -> None:
    """Puts a whole file in the place of another at once; raises `OSError` where it can't.

    Of processes that write at once the last one wins, and a reader sees one of their files.
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
