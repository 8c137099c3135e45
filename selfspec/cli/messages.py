"""What a command says on stderr: what it is doing, and what the library logs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from selfspec.errors import one_line


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
