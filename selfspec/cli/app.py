"""The `selfspec` command and its subcommands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from selfspec.cli.batch.batch_command import batch
from selfspec.cli.cache.cache_command import cache
from selfspec.cli.chat.chat_command import chat
from selfspec.cli.check.check_command import check
from selfspec.cli.demo.demo_command import demo
from selfspec.cli.generate.generate_command import generate
from selfspec.cli.serve.serve_command import serve
from selfspec.cli.shared.group import Commands
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


# In the order in which most people need them.
for each in (demo, check, chat, generate, batch, serve, tune):
    app.command()(each)
app.add_typer(cache)
