"""Colours text by where its tokens came from, on consoles that show colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from selfspec.cli.live_text import OWN, SEVERAL
from selfspec.records import DRAFT_MODEL, HEADS, MAP

_STYLES = {
    OWN: "",
    "lut": "cyan",
    "lut2": "bright_cyan",
    "context": "green",
    "texts": "blue",
    "runners": "yellow",
    MAP: "bright_blue",
    HEADS: "bright_green",
    DRAFT_MODEL: "bright_yellow",
    SEVERAL: "magenta",
}
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def harmless(text: str) -> str:
    """The text without the control characters that a terminal would obey.

    >>> harmless("bell\\a, colour\\x1b[31m\\tand a line\\n")
    'bell, colour[31m\\tand a line\\n'
    """
    return text.translate(_CONTROLS)


class Painter:
    def __init__(self, console: Console) -> None:
        self.console = console

    @property
    def in_colour(self) -> bool:
        """Can this console show colours, and does its user want them?"""
        return self.console.color_system is not None and not self.console.no_color

    def show(self, piece: str, origin: str = OWN) -> None:
        """Shows a piece of running text as it is: not wrapped, without markup."""
        self.write(piece, _STYLES.get(origin, "red"))

    def write(self, text: str, style: str) -> None:
        segment = Segment(harmless(text), Style.parse(style))
        self.console.print(Segments([segment]), end="", crop=False, no_wrap=True)
        self.console.file.flush()

    def legend(self, sources: Sequence[str]) -> Text:
        text = Text("drafted by ")
        for name in (*sources, SEVERAL) if len(sources) > 1 else sources:
            text.append(name, _STYLES[name]).append("  ")
        return text.append("plain: the model's own")
