"""A file of rows that a killed run goes on with: settings in the first line, then a row a line.

Knows JSON and one file; not what a row means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.errors import EvalError

__all__ = ["Journal"]

Values = dict[str, Any]


class Journal:
    """Appends rows to a file, and has those that were there; without a path it keeps nothing.

    What a kill tore off in the middle of the last line is dropped and cut away. Rows are never
    mixed: a file that was begun with other settings is refused, and each difference named.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.rows: list[Values] = []
        if path is None:
            return
        lines = _whole_lines(path)
        if not lines:
            self._write({"settings": dict(settings)})
            return
        begun = _parsed(path, 1, lines[0], "settings")
        _check_same(path, begun["settings"], json.loads(json.dumps(settings)))
        rows = enumerate(lines[1:], start=2)
        self.rows = [_parsed(path, number, line, "answers") for number, line in rows]

    def append(self, row: Values) -> None:
        """Writes a row behind the others, at once."""
        self._write(row)
        self.rows.append(row)

    def _write(self, values: Values) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def _whole_lines(path: Path) -> list[str]:
    """The lines that were written to their end; the rest is cut off the file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
    return content[:end].decode("utf-8", errors="replace").splitlines()


def _parsed(path: Path, number: int, line: str, key: str) -> Values:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, dict) or key not in values:
        raise EvalError(
            f"{path} line {number} must be a JSON object with {key!r} (got {line[:60]!r}); "
            f"name another file with --out"
        )
    return values


def _check_same(path: Path, begun: Values, settings: Values) -> None:
    names = [n for n in {**begun, **settings} if begun.get(n) != settings.get(n)]
    if names:
        told = ", ".join(f"{n} {begun.get(n)!r} (now {settings.get(n)!r})" for n in names)
        raise EvalError(
            f"{path} holds rows of other settings: {told}; "
            f"go on with those, or name another file with --out"
        )
