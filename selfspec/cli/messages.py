"""What a command says on stderr, what the library logs, and how a model's text is shown."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from selfspec.errors import one_line

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def say(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def working(what: str, *, only_spinner: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows `what` with a spinner until it is done. Without a terminal it prints a plain line.

    Yields a function that replaces the text of the spinner. Without a terminal that does nothing,
    and with `only_spinner` nothing is printed at all.
    """
    console = Console(stderr=True)
    if console.is_interactive:
        with console.status(Text(f"{what} ...")) as status:
            yield lambda text: status.update(Text(f"{text} ..."))
        return
    if not only_spinner:
        console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)
    yield lambda _text: None


class _Lines(logging.Handler):
    """Prints messages in plain words, to what is stderr at that moment.

    A warning is printed once: a command may use several `SelfSpec`s, which all warn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._warnings: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one line, and the traceback of a fault in selfspec."""
        line = self.format(record) if record.exc_info else one_line(record.getMessage())
        if record.levelno >= logging.WARNING:
            if line in self._warnings:
                return
            self._warnings.add(line)
            line = f"{record.levelname.lower()}: {line}"
        say(line)


def show_log(verbose: bool) -> None:
    """Shows the library's warnings from now on, and with `verbose` what it prepares, too."""
    logger = logging.getLogger("selfspec")
    logger.handlers = [_Lines()]
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


def harmless(text: str) -> str:
    """The text without the control characters that a terminal would obey.

    >>> harmless("bell\\a, colour\\x1b[31m\\tand a line\\n")
    'bell, colour[31m\\tand a line\\n'
    """
    return text.translate(_CONTROLS)


def paint(console: Console, text: str, style: str = "") -> None:
    """Writes a piece of running text: not wrapped, without markup."""
    segment = Segment(harmless(text), Style.parse(style))
    console.print(Segments([segment]), end="", crop=False, no_wrap=True)
