"""The hand-written sources of the running Python's own library, or of a folder."""

from __future__ import annotations

import re
import sysconfig
import tokenize
from pathlib import Path

_EXCLUDED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
# Build settings of one machine, not written by people.
_GENERATED = re.compile(r"(_sysconfigdata|config-\d)")
# A line of a codec or entity table: a literal first, then a colon or a comment at most.
_TABLE_LINE = re.compile(r"""\s*\(?(0x|\d|u?(['"]).{1,40}\2\s*(:|#)|b?'\\x)""")


def stdlib_folder() -> Path:
    """Where the running interpreter keeps its own `.py` files."""
    return Path(sysconfig.get_path("stdlib"))


def list_sources(folder: Path) -> list[Path]:
    """All wanted `.py` files with text below `folder`, in an order that depends on names alone."""
    paths = sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix())
    wanted = [path for path in paths if _is_wanted(path.relative_to(folder))]
    return [path for path in wanted if (text := read_source(path).strip()) and not _is_table(text)]


def read_source(path: Path) -> str:
    """The text in the encoding that the file itself declares."""
    with tokenize.open(path) as file:
        return file.read()


def _is_wanted(relative: Path) -> bool:
    """Whether a path names hand-written library code; tests and build settings do not."""
    if _EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
        return False
    return not any(_GENERATED.match(part) for part in relative.parts)


def _is_table(text: str) -> bool:
    """Whether more than half of the lines with text are table lines, as in a codec's file."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(bool(_TABLE_LINE.match(line)) for line in lines) > len(lines) / 2
