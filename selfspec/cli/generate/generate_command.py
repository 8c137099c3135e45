"""`selfspec generate`: from a prompt to its continuation, through pipes or files."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from selfspec.cli.shared.live_text import LiveText
from selfspec.cli.shared.messages import Verbose, working
from selfspec.cli.shared.opened import checked, loaded
from selfspec.cli.shared.options import Knobs, MaxNewTokens, WriteOptions, unfolds
from selfspec.cli.shared.paint import harmless
from selfspec.cli.shared.text_files import check_output, read_text, writing
from selfspec.errors import CliError

if TYPE_CHECKING:
    from selfspec.cli.shared.writer import Writer
    from selfspec.plugin import SelfSpec


@unfolds
def generate(
    asked: WriteOptions,
    knobs: Knobs,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file with the prompt; - is stdin.")
    ] = "-",
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write to this file, not to stdout."),
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file that says roughly what the answer will be, such as the text to be edited. "
            "The closer it is, the fewer steps are needed.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    full: Annotated[bool, typer.Option("--full", help="Write the prompt too.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics on stderr.")] = False,
    verbose: Verbose = False,
) -> None:
    """Continue the text of a file or of stdin."""
    config = checked(asked, knobs)
    check_output(output)
    expected = None if prediction is None else read_text(prediction, "--prediction")
    prompt = _read_prompt(file)
    with loaded(asked, max_new_tokens) as writer:
        spec = writer.new_spec(config)
        _write(writer, spec, prompt, expected, output, full=full)
    if stats:
        # A text that goes to stdout may end in the middle of the line.
        start = "\n" if output is None and not sys.stdout.isatty() else ""
        typer.echo(f"{start}{spec.stats}", err=True)


def _read_prompt(name: str) -> str:
    """The text of a file, or for ``-`` all of stdin."""
    if name == "-" and sys.stdin.isatty():
        print("Type the prompt; end it with Ctrl-D on a line of its own.", file=sys.stderr)
    path = None if name == "-" else Path(name)
    prompt = read_text(path, "FILE", "; a text itself goes through a pipe")
    if not prompt:
        where = "stdin" if name == "-" else repr(name)
        raise CliError(f"the prompt must not be empty (got nothing from {where}); write some text")
    return prompt


def _write(
    writer: Writer,
    spec: SelfSpec,
    prompt: str,
    prediction: str | None,
    output: Path | None,
    *,
    full: bool,
) -> None:
    """Streams the continuation; with `full` the prompt comes first."""
    ids = writer.encode(prompt)
    with ExitStack() as stack:
        sink: TextIO = sys.stdout
        if output is not None:
            with writing(output):
                sink = output.open("w", encoding="utf-8", newline="")
            stack.callback(_close, sink)
        spinner = stack.enter_context(ExitStack())

        def show(piece: str, _origin: str = "") -> None:
            spinner.close()
            with writing(output):
                sink.write(harmless(piece) if sink.isatty() else piece)
                sink.flush()

        if full:
            show(prompt)
        spinner.enter_context(working("Reading the prompt", only_spinner=True))
        live = LiveText(writer.tokenizer, ids, show)
        writer.write(ids, spec, streamer=live, prediction=writer.encode_prediction(prediction))
        if sink.isatty() and not live.text.endswith("\n"):
            show("\n")


def _close(sink: TextIO) -> None:
    with suppress(OSError):  # It was told when the text was written.
        sink.close()
