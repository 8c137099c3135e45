"""`selfspec generate`: from a prompt to its continuation, through pipes or files."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from selfspec.cli.shared.live_text import LiveText
from selfspec.cli.shared.messages import say, working
from selfspec.cli.shared.options import Flag, Knobs, Model, WriteOptions
from selfspec.cli.shared.paint import harmless
from selfspec.cli.shared.text_files import check_output, read_text, writing
from selfspec.cli.shared.writer import checked, loaded
from selfspec.errors import CliError

if TYPE_CHECKING:
    from selfspec.cli.shared.writer import Writer
    from selfspec.plugin import SelfSpec


def generate(
    model: Model,
    file: str | None = None,
    /,
    *,
    prompt: str | None = None,
    chat: Flag = False,
    output: Path | None = None,
    prediction: Path | None = None,
    full: Flag = False,
    stats: Flag = False,
    asked: WriteOptions = WriteOptions(),
    knobs: Knobs = Knobs(),
) -> None:
    """Continue a text: from the command line, from a file, or from stdin.

    Args:
        file: The file with the prompt. Default: --prompt, or else stdin.
        prompt: The prompt itself.
        chat: Put the prompt into the model's chat template, as a question.
        output: Write to this new file, not to stdout.
        prediction: A file that says roughly what the answer will be, such as a text to be edited.
        full: Write the prompt too.
        stats: Print statistics on stderr.
    """
    asked = replace(asked, model=model)
    config = checked(asked, knobs.config())
    check_output(output)
    expected = None if prediction is None else read_text(prediction, "--prediction")
    text = _read_prompt(file, prompt)
    with loaded(asked, chats=chat) as writer:
        spec = writer.new_spec(config)
        ids = writer.encode(text, chats=chat)
        _write(writer, spec, ids, expected, output, start=text if full else "")
    if stats:
        # A text that goes to stdout may end in the middle of the line.
        start = "\n" if output is None and not sys.stdout.isatty() else ""
        say(f"{start}{spec.stats}")


def _read_prompt(file: str | None, prompt: str | None) -> str:
    """The text on the command line, that of a file, or all of stdin."""
    if prompt is not None and file is not None:
        raise CliError(f"give FILE or --prompt, not both (got {file!r} and {prompt[:40]!r})")
    if prompt is not None:
        return prompt
    if file is None and sys.stdin.isatty():
        say("Type the prompt; end it with Ctrl-D on a line of its own.")
    path = None if file is None else Path(file)
    text = read_text(path, "FILE", "; --prompt takes the text itself")
    if not text:
        where = "stdin" if file is None else repr(file)
        raise CliError(f"the prompt must not be empty (got nothing from {where}); write some text")
    return text


def _write(
    writer: Writer,
    spec: SelfSpec,
    ids: list[int],
    prediction: str | None,
    output: Path | None,
    *,
    start: str,
) -> None:
    """Streams the continuation behind `start`."""
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

        if start:
            show(start)
        spinner.enter_context(working("Reading the prompt", only_spinner=True))
        live = LiveText(writer.tokenizer, ids, show)
        writer.write(ids, spec, streamer=live, prediction=writer.encode_prediction(prediction))
        if sink.isatty() and not live.text.endswith("\n"):
            show("\n")


def _close(sink: TextIO) -> None:
    with suppress(OSError):  # It was told when the text was written.
        sink.close()
