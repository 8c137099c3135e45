"""Writes text of a model to a terminal, as it is and without harm."""

from __future__ import annotations

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def harmless(text: str) -> str:
    """The text without the control characters that a terminal would obey.

    >>> harmless("bell\\a, colour\\x1b[31m\\tand a line\\n")
    'bell, colour[31m\\tand a line\\n'
    """
    return text.translate(_CONTROLS)


def write(console: Console, text: str, style: str = "") -> None:
    """Writes a piece of running text: not wrapped, without markup."""
    segment = Segment(harmless(text), Style.parse(style))
    console.print(Segments([segment]), end="", crop=False, no_wrap=True)
