"""Questions about code, cut from the running Python's own library: offline, the same every time.

    completion   go on after the first lines of a function
    edit         write a function again with one name changed
    docstring    write a function again with its docstring

Each function serves once. What the library says differs from one Python to the next, and so do
the questions: their hash is kept with every result. `stdlib_edits` has edits with their outcomes.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from eval.benches.python_files import list_sources, read_source, stdlib_folder
from eval.benches.questions import Question

_SEED = 0
_PER_TASK = 40
_LEAST_LINES, _MOST_LINES = 8, 40  # of a function
_LEAST_USES = 3  # of the name that an edit changes


class Edit(NamedTuple):
    """What there was, what is asked for, and what comes of it."""

    task: str
    before: str
    order: str
    after: str


class _Function(NamedTuple):
    """A function's lines, the first docstring line to the last among them, from 0."""

    name: str
    lines: list[str]
    docstring: tuple[int, int]
    parameters: list[str]

    @property
    def code(self) -> str:
        return "\n".join(self.lines)

    @property
    def bare(self) -> str:
        """Without the docstring."""
        start, end = self.docstring
        return "\n".join(self.lines[:start] + self.lines[end + 1 :])

    @property
    def busiest(self) -> str | None:
        """The parameter that is used most, if that is often enough."""
        uses = {name: len(_word(name).findall(self.code)) for name in self.parameters}
        name = max(uses, key=uses.__getitem__, default="")
        return name if uses.get(name, 0) >= _LEAST_USES else None


_Task = Callable[[int, _Function], Question | None]  # None: nothing to ask about this one


def stdlib_questions(folder: Path | None = None, *, per_task: int = _PER_TASK) -> list[Question]:
    """`per_task` questions of each kind, from one function of a file each."""
    functions = _functions(folder)
    questions: list[Question] = []
    tasks: list[_Task] = [_completion, _edit, _docstring]
    for task in tasks:
        found = len(questions)
        for function in functions:
            question = task(len(questions), function)
            questions += [] if question is None else [question]
            if len(questions) - found == per_task:
                break
    return questions


def stdlib_edits(number: int, folder: Path | None = None) -> list[Edit]:
    """Of so many functions: a name changed, the docstring added, and the docstring taken out."""
    edits: list[Edit] = []
    for function in _functions(folder):
        if len(edits) == 3 * number:
            break
        if (name := function.busiest) is not None:
            renamed = _word(name).sub(f"new_{name}", function.code)
            edits += [
                Edit("rename", function.code, _rename_order(name), renamed),
                Edit("insert", function.bare, "Give this function a docstring.", function.code),
                Edit("delete", function.code, "Delete this function's docstring.", function.bare),
            ]
    return edits


def _functions(folder: Path | None) -> Iterator[_Function]:
    """One of each file, in an order that is drawn once and for all."""
    paths = list_sources(folder or stdlib_folder())
    for path in random.Random(_SEED).sample(paths, len(paths)):
        found = list(_documented(read_source(path)))
        if found:
            yield random.Random(path.name).choice(found)


def _documented(source: str) -> Iterator[_Function]:
    """The functions with a docstring that are neither too short nor too long."""
    all_lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        if not _LEAST_LINES <= last - first <= _MOST_LINES or node.body[0] is node.body[-1]:
            continue
        lines = textwrap.dedent("\n".join(all_lines[first:last])).splitlines()
        docstring = node.body[0]
        span = docstring.lineno - 1 - first, (docstring.end_lineno or docstring.lineno) - 1 - first
        parameters = [argument.arg for argument in node.args.args if argument.arg != "self"]
        yield _Function(node.name, lines, span, parameters)


def _completion(number: int, function: _Function) -> Question:
    """The signature, the docstring and one line more are given."""
    start = "\n".join(function.lines[: function.docstring[1] + 2]) + "\n"
    turn = f"Complete this Python function. Answer with the code alone.\n\n{start}"
    return Question(number, "completion", (turn,), start)


def _edit(number: int, function: _Function) -> Question | None:
    """The parameter that is used most gets another name."""
    if (name := function.busiest) is None:
        return None
    order = _rename_order(name)
    turn = f"{order} Write the whole function again.\n\n{function.code}"
    head = _word(name).sub(f"new_{name}", function.lines[0])
    return Question(number, "edit", (turn,), f"{function.code}\n\n\n# {order}\n{head}\n")


def _docstring(number: int, function: _Function) -> Question:
    """The function is given without it."""
    order = "Write this function again with a docstring."
    head = "\n".join(function.lines[: function.docstring[0]])
    plain = f'{function.bare}\n\n\n# {order}\n{head}\n    """'
    return Question(number, "docstring", (f"{order}\n\n{function.bare}",), plain)


def _rename_order(name: str) -> str:
    return f"Rename the parameter {name} to new_{name}."


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b{re.escape(name)}\b")
