"""Writes `docs/reference.md` from the docstrings: `python -m tools.reference`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import docstring_parser

import selfspec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
# What most people call, in the order in which they need it, with the methods worth a look.
NAMES = {
    "attach": (),
    "detach": (),
    "load": (),
    "SelfSpec": ("from_pretrained", "save_pretrained", "forget"),
    "SpecConfig": (),
    "generate_many": (),
    "Answer": (),
    "GenerationStats": (),
}
_WIDTH = 120
_START = """# Reference

What most programs call, made from the docstrings by `python -m tools.reference`.
[How it works](how-it-works.md#of-your-own) has the parts of your own, and
`python docs/website.py FOLDER` makes the reference of all classes.
"""


def page() -> str:
    return _START + "".join(line + "\n" for name in NAMES for line in _about(name))


def _about(name: str) -> Iterator[str]:
    item = getattr(selfspec, name)
    yield from ("", f"## {name}", "")
    yield from _text_of(item, f"selfspec.{name}")
    for method in NAMES[name]:
        yield from ("", f"### {name}.{method}", "")
        yield from _text_of(getattr(item, method), f"{name}.{method}")


def _text_of(item: Any, name: str) -> Iterator[str]:
    doc = docstring_parser.parse(re.sub(r"\n>>> .*", "", inspect.getdoc(item) or "", flags=re.S))
    names = [parameter for parameter in inspect.signature(item).parameters if parameter != "self"]
    yield from wrap(f"`{name}({', '.join(names)})`", _WIDTH, break_on_hyphens=False)
    for text in (doc.short_description, doc.long_description):
        for paragraph in (text or "").split("\n\n"):
            if paragraph:
                yield ""
                yield from wrap(_in_one_line(paragraph), _WIDTH, break_on_hyphens=False)
    for kind, title in (("param", "Arguments"), ("attribute", "Attributes")):
        rows = [part for part in doc.params if part.args[0] == kind]
        if rows:
            yield from ("", f"| {title.lower()} | |", "|---|---|")
            yield from (f"| `{part.arg_name}` | {_cell(part.description)} |" for part in rows)


def _cell(text: str | None) -> str:
    return _in_one_line(text or "").replace("|", "\\|")


def _in_one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
