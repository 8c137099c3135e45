"""The files of `selfspec batch`: prompts, answers so far, and lines that could not be answered.

An answer is appended as soon as it is complete, and says which line it belongs to. So a run that
was killed finds out from its own output where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from selfspec.cli.batch_lines import checksum
from selfspec.cli.errors import CliError

__all__ = ["BatchFiles", "Errors"]

# Each line that we write begins so, and the rest of a line that was cut off does, too.
_START = b'{"line": '


class BatchFiles(NamedTuple):
    """Where prompts come from and answers go."""

    prompts: Path
    answers: Path

    @property
    def errors(self) -> Path:
        """Where it is said which lines could not be answered, and why."""
        return self.answers.with_suffix(f".errors{self.answers.suffix}")

    def check(self) -> None:
        """Refuses files that can't be read or written, and an output that is the input."""
        if not self.prompts.is_file():
            raise CliError(
                f"INPUT must be a file with one prompt a line (got {_named(self.prompts)})"
            )
        if self.answers.is_dir() or not self.answers.absolute().parent.is_dir():
            raise CliError(
                f"OUTPUT must be a file in a folder that exists (got {_named(self.answers)})"
            )
        if self.prompts.resolve() in (self.answers.resolve(), self.errors.resolve()):
            raise CliError(
                f"OUTPUT must be another file than INPUT (got {_named(self.answers)} for both)"
            )

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines of the input that are not empty, with their numbers."""
        try:
            with self.prompts.open("rb") as stream:
                for number, data in enumerate(stream, start=1):
                    if data.strip():
                        yield number, data
        except OSError as error:
            raise CliError(
                f"INPUT must be readable (got {_named(self.prompts)}: {error})"
            ) from error

    def done(self) -> tuple[set[int], int]:
        """The lines that were answered by an earlier run, and how many lines there are.

        Removes what is left of an answer that was cut off. Refuses an output that belongs to
        another input, or to something else altogether; then nothing is changed.
        """
        known = self._known()
        total = 0
        for number, data in self.lines():
            total += 1
            if known.get(number, checksum(data)) != checksum(data):
                raise CliError(
                    f"OUTPUT must belong to INPUT ({_named(self.answers)} holds an answer to "
                    f"another line {number}); name another file, or delete that one"
                )
        self._repair()
        return set(known), total

    def _known(self) -> dict[int, str]:
        """The checksum of each line that was answered."""
        known: dict[int, str] = {}
        for number, data in enumerate(self._whole_answers(), start=1):
            try:
                value = json.loads(data)
                known[int(value["line"])] = str(value["input"])
            except (ValueError, LookupError, TypeError) as error:
                raise CliError(
                    f"OUTPUT must be new, or from an earlier run (got {_named(self.answers)}, "
                    f"whose line {number} is no answer); name another file"
                ) from error
        return known

    def _whole_answers(self) -> Iterator[bytes]:
        if not self.answers.exists():
            return
        with self.answers.open("rb") as stream:
            for data in stream:
                if data.endswith(b"\n") or not _is_cut_off(data):
                    yield data

    def _repair(self) -> None:
        """Cuts off an answer that was not written to its end."""
        if not self.answers.exists():
            return
        with self.answers.open("r+b") as stream:
            end = 0
            for data in stream:
                if data.endswith(b"\n"):
                    end += len(data)
            stream.truncate(end)


class Errors:
    """The file of lines that could not be answered; it is there only if there are any."""

    def __init__(self, path: Path) -> None:
        self.number = 0
        self._path = path
        self._stream: TextIO | None = None
        path.unlink(missing_ok=True)  # Lines that failed in an earlier run are tried again.

    def add(self, line: int, message: str) -> None:
        """Notes why a line could not be answered."""
        if self._stream is None:
            self._stream = self._path.open("w", encoding="utf-8")
        self.number += 1
        fields = {"line": line, "error": message}
        self._stream.write(json.dumps(fields, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing more will come."""
        if self._stream is not None:
            self._stream.close()


def _is_cut_off(data: bytes) -> bool:
    return data.startswith(_START) or _START.startswith(data)


def _named(path: Path) -> str:
    return repr(str(path))
