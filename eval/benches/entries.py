"""JSON objects, one a line, and what is wrong with one: file, line, field and fix.

Knows fields and their types; not what a question is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eval.errors import EvalError

_SHOWN = 60  # characters of what was got


class Entry(NamedTuple):
    """One object, where it stands, and the fields that such an object must have."""

    values: Mapping[str, Any]
    where: str
    fields: tuple[str, ...]

    def text(self, field: str, default: str | None = None) -> str:
        """A text that is not empty."""
        value = self._value(field, default)
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(field, "a text that is not empty", value, '"…"')
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of such texts, one at least."""
        value = self._value(field, None)
        are_texts = isinstance(value, list) and all(
            isinstance(text, str) and text.strip() for text in value
        )
        if not are_texts or not value:
            rule = "a list of texts, none of them empty"
            raise self._wrong(field, rule, value, '["first turn", "second turn"]')
        return tuple(value)

    def name(self, field: str, default: int | str | None = None) -> int | str:
        """A whole number or a text, to tell this object from others."""
        value = self._value(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
            raise self._wrong(field, "a whole number or a text", value, "17")
        return value

    def _value(self, field: str, default: Any) -> Any:
        value = self.values.get(field, default)
        if value is None:
            present = joined(map(repr, self.values)) or "nothing"
            raise EvalError(f"{self._rule()}: {field!r} is missing (got {_cut(present)}); add it")
        return value

    def _wrong(self, field: str, rule: str, got: Any, fix: str) -> EvalError:
        message = f"{field!r} must be {rule} (got {_cut(repr(got))})"
        return EvalError(f"{self._rule()}: {message}; write it as {fix}")

    def _rule(self) -> str:
        return f"{self.where} must be a JSON object with {joined(self.fields)}"


def read_entries(path: Path, fields: tuple[str, ...]) -> Iterator[Entry]:
    """The objects of a file, blank lines left out; what is none is named by its line."""
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise _no_object(where, fields, f"{_cut(repr(line))}: {error}") from error
        if not isinstance(values, dict):
            raise _no_object(where, fields, _cut(repr(line)))
        yield Entry(values, where, fields)


def _no_object(where: str, fields: tuple[str, ...], got: str) -> EvalError:
    rule = f"must be a JSON object with {joined(fields)}"
    return EvalError(f"{where} {rule} (got {got}); mend the line, or take it out")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise EvalError(f"{path} must be readable ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise EvalError(f"{path} line {number} must be UTF-8 text ({error.reason})") from error


def joined(names: Any) -> str:
    """Names as a list in a sentence.

    >>> joined(["question_id", "category", "turns"])
    'question_id, category and turns'
    """
    *most, last = [*names] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
