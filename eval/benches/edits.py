"""Edits of classes from the running Python's own library: before, the order, and after.

    rename   the name that the class uses most gets another one
    insert   one method gets its docstring back
    delete   one method goes away

Each class serves all three. What the library says differs from one Python to the next, and so do
the edits.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from eval.models.tiny_corpus import list_sources, read_source, stdlib_folder

_LEAST_LINES, _MOST_LINES = 20, 45  # of a class
_LEAST_USES = 5  # of the name that is changed

_Method = ast.FunctionDef | ast.AsyncFunctionDef


class Edit(NamedTuple):
    """One edit: what there was, what is asked for, and what comes of it."""

    task: str
    before: str
    order: str
    after: str


class _Class(NamedTuple):
    """The lines of a class that stands at the margin, and its methods."""

    lines: list[str]
    methods: list[_Method]

    @property
    def code(self) -> str:
        return "\n".join(self.lines)

    def without(self, first: int, last: int) -> str:
        """Without the lines `first` to `last`, counted from 1."""
        return "\n".join(self.lines[: first - 1] + self.lines[last:])


def stdlib_edits(num_classes: int, folder: Path | None = None) -> list[Edit]:
    """The edits of so many classes, each from a file of its own, class by class."""
    paths = list_sources(folder or stdlib_folder())
    edits: list[Edit] = []
    for path in random.Random(0).sample(paths, len(paths)):
        if len(edits) == num_classes * len(_TASKS):
            break
        edits += next(filter(None, map(_all_edits, _classes(read_source(path)))), [])
    return edits


def _classes(source: str) -> Iterator[_Class]:
    """The classes that are neither too short nor too long and have three methods or more."""
    all_lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        lines = all_lines[node.lineno - 1 : node.end_lineno]
        code = textwrap.dedent("\n".join(lines))
        if _LEAST_LINES <= len(lines) <= _MOST_LINES and code.startswith("class "):
            (alone,) = ast.parse(code).body
            assert isinstance(alone, ast.ClassDef)
            methods = [each for each in alone.body if isinstance(each, _Method)]
            if len(methods) > 2:
                yield _Class(code.splitlines(), methods)


def _all_edits(given: _Class) -> list[Edit]:
    """One of each kind, or none at all where one can't be made."""
    edits = [make(given) for make in _TASKS]
    return [edit for edit in edits if edit] if all(edits) else []


def _rename(given: _Class) -> Edit | None:
    names = [
        node.attr for node in ast.walk(ast.parse(given.code)) if isinstance(node, ast.Attribute)
    ]
    name, uses = Counter(names).most_common(1)[0] if names else ("", 0)
    if uses < _LEAST_USES:
        return None
    order = f"Rename {name} to new_{name}."
    after = re.sub(rf"\b{re.escape(name)}\b", f"new_{name}", given.code)
    return Edit("rename", given.code, order, after)


def _insert(given: _Class) -> Edit | None:
    """The docstring stands in the class and is taken out of what there was."""
    for method in given.methods:
        docstring = method.body[0]
        if ast.get_docstring(method) and len(method.body) > 1:
            before = given.without(docstring.lineno, docstring.end_lineno or docstring.lineno)
            order = f"Give the method {method.name} a docstring."
            return Edit("insert", before, order, given.code)
    return None


def _delete(given: _Class) -> Edit | None:
    """The second method and the empty lines behind it."""
    method, next_method = given.methods[1:3]
    order = f"Delete the method {method.name}."
    after = given.without(_first_line(method), _first_line(next_method) - 1)
    return Edit("delete", given.code, order, after)


def _first_line(method: _Method) -> int:
    """Decorators belong to a method."""
    return min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)])


_TASKS: tuple[Callable[[_Class], Edit | None], ...] = (_rename, _insert, _delete)
