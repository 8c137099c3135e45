"""The `selfspec` command and its subcommands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.batch.batch_command import batch
from selfspec.cli.cache.cache_command import cache as cache_commands
from selfspec.cli.check.check_command import check
from selfspec.cli.serve.serve_command import serve
from selfspec.cli.shared.group import Commands
from selfspec.cli.shared.log import Verbose
from selfspec.cli.shared.opened import checked, loaded
from selfspec.cli.shared.options import (
    CacheFolder,
    ChatOptions,
    DraftModelName,
    Knobs,
    MaxNewTokens,
    RememberFolder,
    RunOptions,
    Sampling,
    unfolds,
)
from selfspec.cli.tune.tune_command import tune

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The entry point of the `selfspec` script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A model writes characters that not every terminal can show.
            stream.reconfigure(errors="replace")
    app(prog_name="selfspec")


def _print_version(asked: bool) -> None:
    if asked:
        from selfspec import __version__

        print(f"selfspec {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def selfspec(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """The same text from a language model, in fewer forwards."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@unfolds
def demo(
    loading: RunOptions,
    sampling: Sampling,
    knobs: Knobs,
    cache: CacheFolder = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Continue this text; can be given again. Default: three of Python."),
    ] = None,
    max_new_tokens: MaxNewTokens = 48,
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed rounds. More: steadier times, and a longer wait.")
    ] = 3,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw the draft tree with the longest right guess.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Watch drafts being accepted, then see the same text timed against stock generate().

    The embedded model samples at temperature 0.5 with seed 1, unless --temperature or --seed says
    something else.
    """
    from selfspec.cli.demo.snippets import named, sampling_of

    config = checked(loading, knobs)
    with loaded(loading, sampling_of(loading, sampling), max_new_tokens, cache) as writer:
        from selfspec.cli.demo.showing import Demo

        same = Demo(writer, config, named(prompt or []), rounds).run(with_tree=tree)
    raise typer.Exit(0 if same else 1)


@unfolds
def chat(
    loading: ChatOptions,
    sampling: Sampling,
    knobs: Knobs,
    cache: CacheFolder = None,
    remember: RememberFolder = None,
    draft_model: DraftModelName = None,
    system: Annotated[
        str | None, typer.Option(help="The system message, in front of the conversation.")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour the tokens that were drafted.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Talk with a chat model in the terminal."""
    from selfspec.cli.shared.model_loading import check_template

    if loading.model is None:
        check_template(None, None)
    config = checked(loading, knobs, draft_model)
    with loaded(
        loading,
        sampling,
        max_new_tokens,
        cache,
        remember=remember,
        draft_model=draft_model,
        chats=True,
    ) as writer:
        from selfspec.cli.chat.terminal import Chat

        Chat(writer, config, system=system, show_drafts=show_drafts).run()


@unfolds
def generate(
    loading: RunOptions,
    sampling: Sampling,
    knobs: Knobs,
    cache: CacheFolder = None,
    remember: RememberFolder = None,
    draft_model: DraftModelName = None,
    file: Annotated[str, typer.Argument(help="The file with the prompt; - is stdin.")] = "-",
    output: Annotated[
        Path | None, typer.Option(help="Write to this file, not to stdout.", show_default=False)
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file that says roughly what will come, such as the text to be edited. The "
            "nearer it is, the fewer steps it takes.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    full: Annotated[bool, typer.Option("--full", help="Write the prompt too.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics on stderr.")] = False,
    verbose: Verbose = False,
) -> None:
    """Continue a text: prompt in, continuation out."""
    from selfspec.cli.generate.generate_command import (
        check_output,
        read_prediction,
        read_prompt,
        write_continuation,
    )

    config = checked(loading, knobs, draft_model)
    check_output(output)
    expected = read_prediction(prediction)
    text = read_prompt(file)
    with loaded(
        loading, sampling, max_new_tokens, cache, remember=remember, draft_model=draft_model
    ) as writer:
        spec = writer.new_spec(config)
        write_continuation(writer, spec, text, output=output, full=full, prediction=expected)
    if stats:
        # A text that goes to stdout may end in the middle of the line.
        start = "\n" if output is None and not sys.stdout.isatty() else ""
        typer.echo(f"{start}{spec.stats}", err=True)


# In the order in which most people need them.
for each in (demo, check, chat, generate, batch, serve, tune):
    app.command()(each)
app.add_typer(cache_commands)
