"""What the library logs, as lines on stderr: its warnings always, the rest with --verbose."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

from typer import Option

from selfspec.errors import one_line

_LOGGER = logging.getLogger("selfspec")


class _Lines(logging.Handler):
    """Prints each message in plain words, to what is stderr at that moment.

    A warning is printed once: a command may use several `SelfSpec`s, and each of them warns.
    """

    def __init__(self) -> None:
        super().__init__()
        self._warnings: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one line, or all of it for a fault of our own.

        A spinner that is running moves out of its way.
        """
        if record.exc_info:
            print(f"error: {self.format(record)}", file=sys.stderr)
            return
        line = one_line(record.getMessage())
        if record.levelno >= logging.WARNING:
            if line in self._warnings:
                return
            self._warnings.add(line)
            line = f"warning: {line}"
        print(line, file=sys.stderr)


def show_log(verbose: bool) -> bool:
    """Shows the library's warnings from now on, and with `verbose` what it prepares, too."""
    for handler in [each for each in _LOGGER.handlers if isinstance(each, _Lines)]:
        _LOGGER.removeHandler(handler)
    _LOGGER.addHandler(_Lines())
    _LOGGER.setLevel(logging.INFO if verbose else logging.WARNING)
    return verbose


# A command takes this as a parameter, and the callback does the work before the command runs.
Verbose = Annotated[
    bool,
    Option(
        "--verbose",
        "-v",
        callback=show_log,
        help="Also say on stderr what is prepared, and how long that takes.",
    ),
]
