"""Files that a user names: texts and prompts to read, and outputs that must be writable."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selfspec.cli.batch.batch_lines import read_line
from selfspec.errors import CliError

_MARK = "\ufeff"  # Some editors begin a file with it.


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


def read_prompts(path: Path, option: str) -> list[Any]:
    """A prompt a line, as `batch` reads them or with turns, of which the first counts.

    They are texts, lists of messages, or tuples with one question.
    """
    text = read_text(path, option).removeprefix(_MARK)
    lines = text.split("\n")  # Other ends of lines may stand in a text.
    prompts = [
        _prompt(number, line, option) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not prompts:
        raise CliError(f"{option} must have a prompt at least (got {str(path)!r}, which is empty)")
    return prompts


def encoded_prompts(prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """The ids of all prompts."""
    from selfspec.batch.prompts import encoded

    return [encoded(_as_asked(prompt, tokenizer), tokenizer) for prompt in prompts]


def _as_asked(prompt: Any, tokenizer: Any) -> Any:
    """A question, which was read as a tuple, as a chat model is asked it, or any other as text."""
    if not isinstance(prompt, tuple):
        return prompt
    return [{"role": "user", "content": prompt[0]}] if tokenizer.chat_template else prompt[0]


def _prompt(number: int, line: str, option: str) -> Any:
    try:
        value = json.loads(line)
        turns = value.get("turns") if isinstance(value, dict) else None
        if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]:
            return tuple(turns[:1])
        return read_line(number, line.encode()).prompt
    except (CliError, RecursionError, ValueError) as error:
        raise CliError(f"{option}, line {number}: {error}") from error
