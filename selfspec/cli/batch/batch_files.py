"""The files of `selfspec batch`: prompts, answers so far, and lines that could not be answered.

An answer is appended as soon as it is complete, and says which line it belongs to. So a run that
was killed finds out from its own output where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from selfspec.cli.batch.batch_lines import checksum, read_line
from selfspec.errors import CliError
from selfspec.machine.user_files import locked

# Each line that we write begins so; the number of the line follows, and its checksum.
_START = b'{"line": '
_ERRORS = "The file of errors beside OUTPUT"


class Progress(NamedTuple):
    """How far a file of prompts has come."""

    done: set[int]  # the lines that an earlier run has answered
    unreadable: dict[int, str]  # those of the other lines that ask for nothing, and why
    total: int

    @property
    def num_open(self) -> int:
        """How many lines are left for the model."""
        return self.total - len(self.done) - len(self.unreadable)


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
        for path in (self.answers, self.errors):
            if not path.absolute().parent.is_dir() or (path.exists() and not path.is_file()):
                raise CliError(
                    "OUTPUT must be a plain file in a folder that exists, since a run that was "
                    f"stopped goes on from it (got {_named(path)})"
                )
        if self.prompts.resolve() in (self.answers.resolve(), self.errors.resolve()):
            raise CliError(
                f"OUTPUT must be another file than INPUT (got {_named(self.answers)} for both)"
            )
        _check_ours(self.errors)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from this output; refuses one that another run is writing."""
        answers = self.answers.resolve()

        def refused(holder: str) -> CliError:
            return CliError(
                f"OUTPUT must not be written by two runs at once (got {_named(self.answers)}, "
                f"which {holder} is writing); wait for it, or name another file"
            )

        with ExitStack() as stack:
            try:
                path = answers.with_name(f".{answers.name}.lock")
                stack.enter_context(locked(path, refused))
            except OSError as error:
                raise _unwritable("OUTPUT", self.answers, error) from error
            yield

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

    def progress(self) -> Progress:
        """What an earlier run has answered, and which lines can't be understood.

        Removes what is left of an answer that was cut off. Refuses an output that belongs to
        another input, or to something else altogether; then nothing is changed.
        """
        known, rest = self._answered()
        progress, rest_is_ours = Progress(set(known), {}, 0), not rest
        for number, data in self.lines():
            progress = progress._replace(total=progress.total + 1)
            found = checksum(data)
            rest_is_ours = rest_is_ours or _is_start_of(rest, number, found)
            if number not in known:
                _try(number, data, progress.unreadable)
            elif known[number] != found:
                raise CliError(
                    f"OUTPUT must belong to INPUT ({_named(self.answers)} holds an answer to "
                    f"another line {number}); name another file, or delete that one"
                )
        if not progress.total:
            raise CliError(
                f"INPUT must have a prompt at least (got {_named(self.prompts)}, which is empty)"
            )
        if not rest_is_ours:
            raise self._foreign(len(known) + 1)
        self._cut_off(len(rest))
        return progress

    def _answered(self) -> tuple[dict[int, str], bytes]:
        """The checksum of each line that was answered, and the bytes behind the last answer."""
        known: dict[int, str] = {}
        if not self.answers.exists():
            return known, b""
        with self.answers.open("rb") as stream:
            for index, data in enumerate(stream, start=1):
                if not data.endswith(b"\n"):
                    return known, data
                try:
                    value = json.loads(data)
                    known[int(value["line"])] = str(value["input"])
                except (ValueError, LookupError, TypeError, RecursionError) as error:
                    raise self._foreign(index) from error
        return known, b""

    def _foreign(self, line: int) -> CliError:
        return CliError(
            f"OUTPUT must be new, or from an earlier run (got {_named(self.answers)}, whose line "
            f"{line} is no answer to this INPUT); name another file"
        )

    def _cut_off(self, num_bytes: int) -> None:
        """Removes the end of the output, an answer that was not written whole."""
        if num_bytes:
            try:
                os.truncate(self.answers, self.answers.stat().st_size - num_bytes)
            except OSError as error:
                raise _unwritable("OUTPUT", self.answers, error) from error


class Appended:
    """A file that lines are appended to, each of which is on its way to the disk at once."""

    def __init__(self, path: Path, name: str = "OUTPUT") -> None:
        self.number = 0
        self._path, self._name = path, name
        self._stream: BinaryIO | None = None

    def add(self, line: str) -> None:
        """Appends a line; the file is made with the first one."""
        self.number += 1
        try:
            if self._stream is None:
                self._stream = self._path.open("ab")
            self._stream.write(line.encode("utf-8"))
            self._stream.flush()
        except OSError as error:
            raise _unwritable(self._name, self._path, error) from error

    def close(self) -> None:
        """Nothing more will come."""
        if self._stream is not None:
            with suppress(OSError):  # It was told when the line was written.
                self._stream.close()


class Errors(Appended):
    """The file of lines that could not be answered; it is there only if there are any."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _ERRORS)
        try:
            path.unlink(missing_ok=True)  # Lines that failed in an earlier run are tried again.
        except OSError as error:
            raise _unwritable(_ERRORS, path, error) from error

    def note(self, line: int, message: str) -> None:
        """Says why a line could not be answered."""
        self.add(json.dumps({"line": line, "error": message}) + "\n")


def _try(number: int, data: bytes, unreadable: dict[int, str]) -> None:
    """Notes why a line can't be understood, if it can't."""
    try:
        read_line(number, data)
    except CliError as error:
        unreadable[number] = str(error)


def _is_start_of(data: bytes, number: int, found: str) -> bool:
    """Can this be the start of what we write for a line of the input?"""
    start = _START + f'{number}, "input": "{found}"'.encode()
    return start.startswith(data) or data.startswith(start)


def _check_ours(errors: Path) -> None:
    """Refuses to replace a file that is not one of ours."""
    if not errors.exists():
        return
    try:
        with errors.open("rb") as stream:
            foreign = not all(_is_error(data) for data in stream)
    except OSError as error:
        raise _unwritable(_ERRORS, errors, error) from error
    if foreign:
        raise CliError(
            f"the file of errors beside OUTPUT must be new, or from an earlier run (got "
            f"{_named(errors)}, which holds something else); move it, or name another OUTPUT"
        )


def _is_error(data: bytes) -> bool:
    """Is it a line of errors, whole or cut off?"""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return not data.endswith(b"\n") and data.startswith(_START)
    return isinstance(value, dict) and set(value) == {"line", "error"}


def _unwritable(name: str, path: Path, error: OSError) -> CliError:
    return CliError(
        f"{name} must be writable (got {_named(path)}: {error.strerror or error}); what was "
        "written stays, and the same command goes on from there"
    )


def _named(path: Path) -> str:
    return repr(str(path))
