"""Where a text in JSON is, and how its writer spaces the parts.

Grammars mostly allow any whitespace between two parts of JSON, but a writer keeps to one style. So
what came between two kinds of parts tells what will come between them again.
"""

from __future__ import annotations

from typing import NamedTuple

_QUOTE = ord('"')
_ESCAPE = ord("\\")
_SPACE, _OPEN, _CLOSE = b" \n\r\t", b"{[", b"}]"
_VALUE = ord("v")  # The kind of strings, numbers and names.


class JsonText(NamedTuple):
    """The end of a text: the open brackets, the last part, and the whitespace after it.

    The characters of one value lead to the same object.
    """

    open: bytes = b""
    last: int = 0  # The kind of the last part; 0 at the start.
    space: bytes = b""
    is_string: bool = False  # Is the text inside a string?
    is_escaped: bool = False

    def read(self, data: bytes, spacing: Spacing | None = None) -> JsonText:
        """The text with some bytes more, from which a spacing learns."""
        text = self
        for char in data:
            text = text._step(char, spacing)
        return text

    def _step(self, char: int, spacing: Spacing | None) -> JsonText:
        if self.is_string:
            if self.is_escaped or char == _ESCAPE:
                return self._replace(is_escaped=not self.is_escaped)
            return JsonText(self.open, _VALUE) if char == _QUOTE else self
        if char in _SPACE:
            return self._replace(space=self.space + bytes((char,)))
        part = part_of(char)
        if part == self.last == _VALUE and not self.space and char != _QUOTE:
            return self
        if spacing is not None and self.last:
            spacing.observe(self, char)
        if char in _OPEN:
            return JsonText(self.open + bytes((char,)), char)
        if char in _CLOSE:
            return JsonText(self.open[:-1], _VALUE)
        return JsonText(self.open, part, is_string=char == _QUOTE)


def part_of(char: int) -> int:
    """The kind of part that a character begins: itself, if it is one of ``{}[],:``."""
    return char if char in b"{}[],:" else _VALUE


class Spacing:
    """What one writer puts between two parts of JSON."""

    def __init__(self) -> None:
        # Whitespace within a line, or how far each open bracket indents a new one.
        self._seen: dict[tuple[bytes, int, int], bytes | int] = {}
        self._gap = b" "  # The last whitespace after a comma or colon.
        self._indent: int | None = None  # of the last line

    def observe(self, text: JsonText, char: int) -> None:
        """Learns the whitespace at the end of a text from the character after it."""
        key, space = self._key(text, char), text.space
        if b"\n" in space:
            width = len(space) - 1 - space.rfind(b"\n")
            self._seen[key] = self._indent = width // max(_depth(text, char), 1)
            return
        self._seen[key] = space
        if text.last in b",:":
            self._gap = space

    def before(self, text: JsonText, char: int) -> tuple[bytes, bool]:
        """The likely whitespace between a text and a character, and whether it was seen before."""
        if not text.last:
            return b"", False
        seen = self._seen.get(self._key(text, char))
        if isinstance(seen, bytes):
            return seen, True
        indent = self._indent if seen is None else seen
        if seen is not None or (indent is not None and (text.last in b"{[," or char in _CLOSE)):
            return b"\n" + b" " * ((indent or 0) * _depth(text, char)), seen is not None
        return (self._gap if text.last in b",:" else b""), False

    @staticmethod
    def _key(text: JsonText, char: int) -> tuple[bytes, int, int]:
        return text.open[-1:], text.last, part_of(char)


def _depth(text: JsonText, char: int) -> int:
    """The brackets that are open where a line begins with a character."""
    return len(text.open) - (char in _CLOSE)
