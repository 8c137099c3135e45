"""What somebody types or pastes at a terminal while a command is busy with something else."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Keys that write no text, such as the arrows, and the marks around a pasted text.
_NO_TEXT = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.|.)?|[^\n\t\x20-\U0010ffff]|\x7f")
_PAUSE = 0.05  # In seconds. A long text that is pasted comes in pieces, one soon after the other.


class TypedAhead:
    """Keeps what is typed meanwhile, which the terminal would write into the midst of an answer."""

    def __init__(self) -> None:
        self._text = ""

    def take(self) -> str:
        """What was typed since the last time."""
        text, self._text = self._text, ""
        return text

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, the terminal shows nothing of what is typed; Ctrl-C works as always."""
        try:
            import termios
        except ImportError:  # Windows shows nothing unasked, and keeps what is typed by itself.
            yield
            return
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        silent = list(before)
        silent[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(terminal, termios.TCSANOW, silent)
        try:
            yield
        finally:
            self._text += _plain(_waiting(terminal))
            termios.tcsetattr(terminal, termios.TCSANOW, before)


def _waiting(terminal: int) -> bytes:
    """All that waits to be read."""
    parts: list[bytes] = []
    while select.select([terminal], [], [], _PAUSE if parts else 0)[0]:
        part = os.read(terminal, 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def _plain(data: bytes) -> str:
    """What was typed as text, with the ends of lines that Python has."""
    text = data.decode("utf-8", errors="ignore").replace("\r\n", "\n").replace("\r", "\n")
    return _NO_TEXT.sub("", text)
