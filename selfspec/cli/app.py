"""The `selfspec` command: its subcommands, and how errors end it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from selfspec.cli.cache import cache as cache_commands
from selfspec.cli.errors import one_line
from selfspec.cli.options import (
    CacheFolder,
    Knobs,
    MaxNewTokens,
    ModelOptions,
    Sampling,
    unfolds,
)
from selfspec.config import SpecConfig
from selfspec.errors import SelfSpecError

if TYPE_CHECKING:
    from selfspec.store import CacheContents

__all__ = ["app", "main"]

_USER_ERROR = 2
_INTERRUPTED = 130
# newer typers bring a click of their own, older ones take the installed one
_ClickException: Any = typer.BadParameter.__mro__[2]


class _Group(TyperGroup):
    """Ends with one line and exit status 2 on what the user got wrong, in place of a panel."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command; everything else that goes wrong keeps its traceback."""
        extra["standalone_mode"] = False
        try:
            status = super().main(*args, **extra)
        except SelfSpecError as error:
            status = _complain(str(error))
        except _ClickException as error:
            status = _complain(error.format_message())
        except (typer.Abort, KeyboardInterrupt):
            status = _INTERRUPTED
        if not standalone_mode:
            return status
        sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(cls=_Group, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(cache_commands)


def main() -> None:
    """The entry point of the `selfspec` script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a model writes characters that not every terminal has
            stream.reconfigure(errors="replace")
    app(prog_name="selfspec")


def _complain(message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return _USER_ERROR


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


@app.command()
@unfolds
def demo(
    loading: ModelOptions,
    sampling: Sampling,
    knobs: Knobs,
    cache: CacheFolder = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Continue this; can be given again. Default: starts of Python files."),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed rounds. More: steadier times, and a longer wait.")
    ] = 1,
    tree: Annotated[bool, typer.Option("--tree", help="Draw the tree that guessed most.")] = False,
) -> None:
    """Watch drafts being accepted, then see the same text timed against stock generate()."""
    config, held = _checked(loading, knobs), _opened(cache)
    from selfspec.cli.demo import Demo
    from selfspec.cli.loading import quiet
    from selfspec.cli.snippets import named

    with quiet():
        writer = _writer(loading, sampling, max_new_tokens, held)
        same = Demo(writer, config, named(prompt or []), rounds).run(with_tree=tree)
    raise typer.Exit(0 if same else 1)


@app.command()
@unfolds
def chat(
    loading: ModelOptions,
    sampling: Sampling,
    knobs: Knobs,
    cache: CacheFolder = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour the tokens that were drafted.")
    ] = False,
) -> None:
    """Talk with a chat model."""
    from selfspec.cli.loading import check_template, load_tokenizer, quiet

    if loading.model is None:
        check_template(None, None)
    config, held = _checked(loading, knobs), _opened(cache)
    from selfspec.cli.chat import Chat

    with quiet():
        check_template(loading.model, load_tokenizer(loading).chat_template)
        writer = _writer(loading, sampling, max_new_tokens, held)
        Chat(writer, config, system=system, show_drafts=show_drafts).run()


@app.command()
@unfolds
def generate(
    loading: ModelOptions,
    sampling: Sampling,
    knobs: Knobs,
    cache: CacheFolder = None,
    file: Annotated[str, typer.Argument(help="The prompt's file; - is stdin.")] = "-",
    output: Annotated[
        Path | None, typer.Option(help="Write to this file, not to stdout.", show_default=False)
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    full: Annotated[bool, typer.Option("--full", help="Write the prompt too.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Statistics on stderr.")] = False,
) -> None:
    """Continue a text: prompt in, continuation out."""
    from selfspec.cli.generate import check_output, read_prompt, write_continuation
    from selfspec.cli.loading import quiet

    config = _checked(loading, knobs)
    check_output(output)
    text, held = read_prompt(file), _opened(cache)
    with quiet():
        writer = _writer(loading, sampling, max_new_tokens, held)
        spec = writer.new_spec(config)
        write_continuation(writer, spec, text, output=output, full=full)
    if stats or spec.stats.disabled_reason:
        print(spec.stats, file=sys.stderr)


@app.command()
@unfolds
def profile(
    loading: ModelOptions,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of text in front. More: dearer attention.")
    ] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Rows in a forward.")] = 1,
    forward: Annotated[
        str,
        typer.Option(help="How the model is run: auto, eager, packed or graph."),
    ] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="Write the curve to this JSON file.", show_default=False)
    ] = None,
) -> None:
    """What a forward of each width costs on this machine, in a table and a plot."""
    from selfspec.cli.generate import check_output
    from selfspec.cli.loading import check_options, load_model, load_tokenizer, quiet

    check_options(loading)
    check_output(output)
    config = SpecConfig.of(forward=forward)
    from rich.console import Console

    from selfspec.cli.profile import check_context, print_curve, write_curve
    from selfspec.run.prepared import profile as measure

    with quiet(), Console(stderr=True).status("measuring"):
        model = load_model(loading, load_tokenizer(loading)).model
        check_context(context, model)
        about, curve = measure(model, config, num_columns=context, num_rows=batch)
    print_curve(Console(), curve, about)
    if output is not None:
        write_curve(output, curve, about)


def _checked(loading: ModelOptions, knobs: Knobs) -> SpecConfig:
    """The knobs, with all options looked at that can be before torch is imported."""
    from selfspec.cli.loading import check_options

    check_options(loading)
    return knobs.config()


def _opened(cache: str | None) -> CacheContents | None:
    """What --cache names, read before the model: it is sooner said what is wrong with it."""
    if cache is None:
        return None
    from selfspec.store import load_cache

    return load_cache(cache)


def _writer(
    loading: ModelOptions, sampling: Sampling, max_new_tokens: int, held: CacheContents | None
) -> Any:
    """The model, loaded; a spinner says so where somebody sees it."""
    from rich.console import Console

    from selfspec.cli.loading import load_model, load_tokenizer
    from selfspec.cli.writer import Writer
    from selfspec.store import check_tokenizer, tokenizer_info

    with Console(stderr=True).status(f"loading {loading.model or 'the embedded model'}"):
        tokenizer = load_tokenizer(loading)
        if held is not None:
            check_tokenizer("--cache", held.tokenizer, tokenizer_info(tokenizer))
        loaded = load_model(loading, tokenizer)
        return Writer(loaded, sampling, max_new_tokens, held)
