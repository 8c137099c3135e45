"""`selfspec generate`: from a prompt to its continuation, through pipes or files."""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from selfspec.cli.live_text import LiveText
from selfspec.cli.loading import check_options
from selfspec.cli.messages import say, working
from selfspec.cli.options import Flag, Knobs, Model, WriteOptions
from selfspec.cli.paint import harmless
from selfspec.cli.writer import loaded
from selfspec.errors import CliError
from selfspec.serving.schema import Settings

if TYPE_CHECKING:
    from selfspec.cli.writer import Writer
    from selfspec.plugin import SelfSpec


def generate(
    model: Model,
    file: Path | None = None,
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
        file: The file with the prompt. Default: stdin.
        prompt: The prompt itself.
        chat: Ask it as a question, in the model's chat template.
        output: Write to this new file, not to stdout.
        prediction: A file that says roughly what will be written.
        full: Write the prompt too.
        stats: Print statistics on stderr.
    """
    asked, config = replace(asked, model=model), knobs.config()
    check_options(asked)
    _check_output(output)
    text = _read_prompt(file, prompt)
    expected = None if prediction is None else _read(prediction, "--prediction")
    writer = loaded(asked, chats=chat)
    spec = writer.loaded.new_spec(config)
    question = [{"role": "user", "content": text}] if chat else text
    ids, _ = writer.encoder().arguments_for(question, Settings())
    assert isinstance(ids, list)  # A text has no images.
    with (
        nullcontext(sys.stdout)
        if output is None
        else output.open("w", encoding="utf-8", newline="") as sink
    ):
        _write(writer, spec, ids, sink, start=text if full else "", expected=expected)
    if stats:
        # A text that goes to stdout may end in the middle of the line.
        start = "\n" if output is None and not sys.stdout.isatty() else ""
        say(f"{start}{spec.stats}")


def _check_output(path: Path | None) -> None:
    if path is None or (path.parent.is_dir() and not path.is_file() and not path.is_dir()):
        return  # It may be a device or a pipe.
    raise CliError(f"--output must be a new file in a folder that exists (got {str(path)!r})")


def _read(path: Path | None, option: str) -> str:
    data = sys.stdin.buffer.read() if path is None else path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(
            f"{option} must be UTF-8 text (got another encoding, at byte {error.start}); save it "
            "as UTF-8"
        ) from error


def _read_prompt(file: Path | None, prompt: str | None) -> str:
    if prompt is not None and file is not None:
        raise CliError(f"give FILE or --prompt, not both (got {str(file)!r} and {prompt[:40]!r})")
    if file is not None and not file.exists():
        raise CliError(f"FILE must exist (got {str(file)!r}); --prompt takes the text itself")
    if prompt is None and file is None and sys.stdin.isatty():
        say("Type the prompt; end it with Ctrl-D on a line of its own.")
    text = _read(file, "FILE") if prompt is None else prompt
    if not text:
        raise CliError("the prompt must not be empty (got no text); write some text")
    return text


def _write(
    writer: Writer,
    spec: SelfSpec,
    ids: list[int],
    sink: TextIO,
    *,
    start: str,
    expected: str | None,
) -> None:
    with ExitStack() as spinner:

        def show(piece: str, _origin: str = "") -> None:
            spinner.close()
            sink.write(harmless(piece) if sink.isatty() else piece)
            sink.flush()

        show(start)
        spinner.enter_context(working("Reading the prompt", only_spinner=True))
        live = LiveText(writer.tokenizer, ids, show)
        writer.write(ids, spec, streamer=live, prediction=expected)
    if sink.isatty() and not live.text.endswith("\n"):
        sink.write("\n")
