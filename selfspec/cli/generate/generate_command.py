"""`selfspec generate`: from a prompt to its continuation, through pipes or files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from selfspec.cli.shared.live_text import LiveText
from selfspec.cli.shared.paint import harmless
from selfspec.cli.shared.waiting import waiting
from selfspec.cli.shared.writer import Writer
from selfspec.errors import CliError

if TYPE_CHECKING:
    from selfspec.plugin import SelfSpec


def read_prompt(name: str) -> str:
    """The text of a file, or for ``-`` all of stdin; it must be UTF-8 and not empty."""
    if name == "-" and sys.stdin.isatty():
        print("Type the prompt; end it with Ctrl-D on a line of its own.", file=sys.stderr)
    prompt = _read(None if name == "-" else Path(name), "FILE", "the prompt")
    if not prompt:
        where = "stdin" if name == "-" else repr(name)
        raise CliError(f"the prompt must not be empty (got nothing from {where}); write some text")
    return prompt


def read_prediction(path: Path | None) -> str | None:
    """The text of the file, which must be UTF-8; None if no file is named."""
    return None if path is None else _read(path, "--prediction", "--prediction")


def check_output(path: Path | None, option: str = "--output") -> None:
    """Refuses an output that can't be a file, before the model is loaded. Writes nothing."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise CliError(f"{option} must be a file in a folder that exists (got {str(path)!r})")


def write_continuation(
    writer: Writer,
    spec: SelfSpec,
    prompt: str,
    *,
    output: Path | None,
    full: bool,
    prediction: str | None = None,
) -> None:
    """Streams the continuation; with `full` the prompt comes first."""
    ids = writer.encode(prompt)
    expected = writer.encode_prediction(prediction)
    with _opened(output) as sink, ExitStack() as spinner:

        def show(piece: str, _origin: str = "") -> None:
            spinner.close()
            sink.write(harmless(piece) if sink.isatty() else piece)
            sink.flush()

        if full:
            show(prompt)
        spinner.enter_context(waiting("Reading the prompt"))
        live = LiveText(writer.tokenizer, ids, show)
        writer.write(ids, spec, live=live, prediction=expected)
        if sink.isatty() and not live.text.endswith("\n"):
            show("\n")


def _read(path: Path | None, argument: str, what: str) -> str:
    """The text of a file, or of stdin."""
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{what} must be UTF-8 text (got byte {error.start} wrong)") from error
    except OSError as error:
        raise CliError(
            f"{argument} must be readable (got {str(path)!r}: {error.strerror})"
        ) from error


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    try:
        sink = output.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise CliError(f"--output must be writable (got {str(output)!r}: {error})") from error
    with sink:
        yield sink
