"""Files that a user names: texts to read, and outputs that must be writable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selfspec.errors import CliError


def check_output(path: Path | None, option: str = "--output") -> None:
    """Refuses an output that can't be a file, or is one already, before the model is loaded."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise CliError(f"{option} must be a file in a folder that exists (got {str(path)!r})")
    if path.is_file():  # A device or a pipe may be there.
        raise CliError(
            f"{option} must be a new file (got {str(path)!r}, which exists); name another, or "
            "delete that one"
        )


@contextmanager
def writing(path: Path | None, option: str = "--output") -> Iterator[None]:
    """Inside, a file or stdout is written; a full disk is one line. A reader may leave."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        name, got = ("stdout", "") if path is None else (option, f"{str(path)!r}: ")
        raise CliError(f"{name} must be writable (got {got}{error.strerror})") from error


def write_text(path: Path, option: str, text: str) -> None:
    """Writes an output as a whole."""
    with writing(path, option):
        path.write_text(text, encoding="utf-8")


def read_text(path: Path | None, option: str, fix: str = "") -> str:
    """The text of a file, or of stdin, which must be UTF-8."""
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{option} must be UTF-8 text (got byte {error.start} wrong)") from error
    except OSError as error:
        got = "stdin" if path is None else repr(str(path))
        message = f"{option} must be readable (got {got}: {error.strerror}){fix}"
        raise CliError(message) from error
