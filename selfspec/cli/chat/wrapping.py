"""Breaks running text between words, where a terminal would break it inside of one."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Takes a text in pieces and hands it on word by word, each where it fits into its line.

    A word is held back until the white space behind it comes, since the next piece may make it
    longer. Each piece has an origin, which is handed on with every part of it.

    >>> parts = []
    >>> wrap = WordWrap(lambda text, origin: parts.append(text), lambda: 9)
    >>> for piece in ("one ", "two th", "ree"):
    ...     wrap.add(piece, "")
    >>> wrap.end()
    >>> "".join(parts)
    'one two\\nthree'
    """

    def __init__(self, write: Callable[[str, str], object], width: Callable[[], int]) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._space: list[tuple[str, str]] = []  # It stands in front of the word.
        self._word: list[tuple[str, str]] = []

    def add(self, piece: str, origin: str) -> None:
        """Takes the next piece of the text."""
        for part in _PARTS.findall(piece):
            if part == "\n":
                self._put_word()
                self._break_line(origin)
            elif part.isspace():
                self._put_word()
                self._space.append((part, origin))
            else:
                self._add_to_word(part, origin)

    def end(self) -> None:
        """Hands on what was held back, and begins a new text at the start of a line."""
        self._put_word()
        self._column = 0
        self._space.clear()

    def _add_to_word(self, part: str, origin: str) -> None:
        """Scripts with wide characters need no spaces: a line may break behind each of them."""
        if cell_len(part) == len(part):
            self._word.append((part, origin))
        else:
            for character in part:
                self._word.append((character, origin))
                if cell_len(character) > 1:
                    self._put_word()

    def _put_word(self) -> None:
        """Writes the word: in this line if there is room, else at the start of the next one."""
        if not self._word:
            return
        width, length = self._width(), sum(cell_len(text) for text, _ in self._word)
        space = sum(len(text.expandtabs()) for text, _ in self._space)
        if self._column and self._column + space + length > width:
            self._break_line(self._word[0][1])
            space = 0
        for text, origin in (*self._space, *self._word):
            self._write(text, origin)
        end = self._column + space + length
        self._column = (end - 1) % width + 1  # The terminal breaks a word longer than a line.
        self._space.clear()
        self._word.clear()

    def _break_line(self, origin: str) -> None:
        self._space.clear()
        self._write("\n", origin)
        self._column = 0
