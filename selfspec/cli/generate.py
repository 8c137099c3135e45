"""`selfspec generate`: from a prompt to its continuation, through pipes or files."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.cli.loading import check_options
from selfspec.cli.messages import harmless, say, working
from selfspec.cli.options import Flag, Knobs, Model, WriteOptions
from selfspec.cli.writer import load_writer
from selfspec.errors import CliError
from selfspec.serving.settings import Settings

if TYPE_CHECKING:
    from selfspec import SelfSpec
    from selfspec.cli.writer import Writer


def generate(
    model: Model,
    file: Path | None = None,
    /,
    *,
    prompt: str | None = None,
    chat: Flag = False,
    prediction: Path | None = None,
    stats: Flag = False,
    options: WriteOptions = WriteOptions(),
    knobs: Knobs = Knobs(),
) -> None:
    """Continue a text: from the command line, from a file, or from stdin.

    Args:
        file: The file with the prompt. Default: stdin.
        prompt: The prompt itself.
        chat: Put it as a question, in the model's chat template.
        prediction: A file that says roughly what will be written.
        stats: Print statistics on stderr.
    """
    options, config = replace(options, model=model), knobs.config()
    check_options(options)
    text = _read_prompt(file, prompt)
    expected = None if prediction is None else _read(prediction, "--prediction")
    writer = load_writer(options, chats=chat)
    spec = writer.new_spec(config)
    question = [{"role": "user", "content": text}] if chat else text
    ids, _ = writer.translator().arguments_for(question, Settings())
    assert isinstance(ids, list)  # A text has no images.
    _stream(writer, ids, spec, expected)
    if stats:
        # A text that goes to a pipe or a file may end in the middle of the line.
        say(str(spec.stats) if sys.stdout.isatty() else f"\n{spec.stats}")


def _stream(writer: Writer, ids: list[int], spec: SelfSpec, prediction: str | None) -> None:
    """Writes the continuation to stdout as it comes. At a terminal it ends with the line."""
    from selfspec.batch.text_stream import LiveText

    out = sys.stdout
    with ExitStack() as spinner:

        def show(piece: str) -> None:
            spinner.close()
            out.write(harmless(piece) if out.isatty() else piece)
            out.flush()

        spinner.enter_context(working("Reading the prompt", only_spinner=True))
        live = LiveText(writer.tokenizer, ids, show)
        writer.new_ids(ids, spec, streamer=live, prediction=prediction)
    if out.isatty() and not live.text.endswith("\n"):
        out.write("\n")


def _read(path: Path | None, option: str) -> str:
    if path is not None and (path.is_dir() or not path.exists()):
        hint = "; --prompt takes the text itself" if option == "FILE" else ""
        raise CliError(f"{option} must be a file that exists (got {str(path)!r}){hint}")
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
    if prompt is None and file is None and sys.stdin.isatty():
        say("Type the prompt; end it with Ctrl-D on a line of its own.")
    text = _read(file, "FILE") if prompt is None else prompt
    if not text:
        raise CliError("the prompt must not be empty (got no text); write some text")
    return text
