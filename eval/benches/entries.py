"""Rows of a bench: one JSON object a line, checked; what is wrong with one names line and field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, StrictInt, StrictStr, StringConstraints, ValidationError

from eval.errors import EvalError

Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]
Texts = Annotated[list[Text], Field(min_length=1)]
Id = StrictInt | StrictStr


class Entry(NamedTuple):
    """A row, its number, and where it stands."""

    row: Any  # has a `question`
    number: int
    where: str


def read_entries(path: Path, kind: type[BaseModel]) -> list[Entry]:
    """The rows of a file, blank lines left out."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{path} must be a file of UTF-8 text: {error}") from error
    return [
        entry(f"{path} line", number, lambda line=line: kind.model_validate_json(line))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def entry(source: str, number: int, read: Callable[[], BaseModel]) -> Entry:
    """What `read` gives; the first thing that is wrong with it is one line."""
    where = f"{source} {number}"
    try:
        return Entry(read(), number, where)
    except ValidationError as error:
        raise EvalError(f"{where}: {_first(error.errors()[0])}; mend it") from error


def _first(problem: Any) -> str:
    field = ".".join(map(str, problem["loc"])) or "the row"
    return f"{field}: {problem['msg']} (got {str(problem['input'])[:60]!r})"
