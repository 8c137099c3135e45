"""`selfspec cache`: builds, inspects and merges caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from selfspec.cli.cache.recipe_options import RecipeOptions
from selfspec.cli.shared.group import Commands
from selfspec.cli.shared.messages import Verbose, working
from selfspec.cli.shared.options import ModelOptions, unfolds
from selfspec.cli.shared.paint import harmless
from selfspec.errors import CliError
from selfspec.machine.memory import amount_in_bytes

if TYPE_CHECKING:
    from selfspec.cache import CacheContents

Output = Annotated[Path, typer.Argument(help="The cache to make.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a cache that exists.")]

cache = typer.Typer(name="cache", cls=Commands)


@cache.callback(invoke_without_command=True)
def commands(context: typer.Context) -> None:
    """Build, inspect and merge caches."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@cache.command()
@unfolds
def build(
    loading: ModelOptions,
    options: RecipeOptions,
    output: Output,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A recipe that comes with selfspec (code, dialogue, folder, oanc, own-answers, "
            "vocabulary), or a TOML file with the keys below. Options override its keys.",
        ),
    ] = None,
    max_memory: Annotated[
        str,
        typer.Option(
            help="Memory for counting n-grams, without the model. What does not fit loses its "
            "rarest long n-grams."
        ),
    ] = "4GB",
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Build a cache from texts, or from the model's own answers to them.

    If a build of own answers was interrupted, the same command goes on with the next answer.
    """
    from selfspec.cli.shared.model_loading import check_options

    asked = options.recipe(recipe)
    check_options(loading)
    memory = amount_in_bytes(max_memory, name="--max-memory")
    _check_free(output, overwrite)
    with working(f"Loading the tokenizer of {loading.title}"):
        from selfspec.building.build import build_cache
        from selfspec.building.documents import find_inputs
        from selfspec.building.progress import Bars
        from selfspec.cli.shared.model_loading import load_model, load_tokenizer, quiet

        if not asked.reads_vocabulary:
            find_inputs(asked)  # A wrong path is told before anything is loaded.
        with quiet():
            tokenizer = load_tokenizer(loading)
    with quiet(), Bars(Console(stderr=True)) as bars:

        def model() -> Any:
            bars.say(f"Loading {loading.title} ...")
            return load_model(loading, tokenizer).model

        try:
            contents = build_cache(
                asked,
                output,
                tokenizer,
                model,
                bars=bars,
                model_name=loading.model,
                max_memory=memory,
                overwrite=overwrite,
            )
        except KeyboardInterrupt as error:
            if asked.generates:
                bars.say("interrupted; the same command goes on with the next answer")
            raise typer.Abort from error
    _print_contents(output, contents)
    if left_out := contents.about.get("left_out"):
        print(f"left out (empty, too long, or refused by the template): {left_out:,}")


@cache.command()
def inspect(
    folder: Annotated[str, typer.Argument(metavar="CACHE", help="A cache or a Hub id.")],
    verbose: Verbose = False,
) -> None:
    """Show what is in a cache, and where it comes from."""
    with working(f"Reading {folder}"):
        from selfspec.cache import load_cache

        contents = load_cache(folder)
    _print_contents(folder, contents)
    for name, value in sorted(contents.about.items()):
        print(harmless(f"{name}: {value}"))  # A card may come from anywhere, and hold anything.


@cache.command()
def merge(
    output: Output,
    caches: Annotated[list[Path], typer.Argument(help="Caches of one tokenizer.")],
    overwrite: Overwrite = False,
    min_count: Annotated[
        int, typer.Option(min=1, help="Drop n-grams with a lower count. More: a smaller file.")
    ] = 1,
    max_continuations: Annotated[
        int, typer.Option(min=1, help="Continuations kept for each prefix. More: a larger file.")
    ] = 8,
    max_size: Annotated[
        str,
        typer.Option(help="Largest n-gram tables; the minimum count is raised until they fit."),
    ] = "64MB",
    verbose: Verbose = False,
) -> None:
    """Merge caches. Counts add up; of two LUT rows with one key, the later cache's is kept."""
    size = amount_in_bytes(max_size, name="--max-size")
    _check_free(output, overwrite)
    with working(f"Merging into {output}"):
        from selfspec.building.merging import merge_caches

        contents = merge_caches(
            output,
            caches,
            overwrite=overwrite,
            min_count=min_count,
            max_continuations=max_continuations,
            max_bytes=size,
        )
    _print_contents(output, contents)


def _check_free(output: Path, overwrite: bool) -> None:
    """Refuses what is there already; whether it is a cache is checked by whoever replaces it."""
    taken = any(output.iterdir()) if output.is_dir() else output.exists()
    if taken and not overwrite:
        raise CliError(
            f"OUTPUT must be new (got {str(output)!r}, which exists); pass --overwrite to replace "
            "it, or name another"
        )


def _print_contents(name: object, contents: CacheContents) -> None:
    """A line on what is in a cache."""
    parts = [f"{len(arrays['ids']):,} {table} rows" for table, arrays in contents.tables.items()]
    if contents.corpus is not None:
        parts.append(
            f"{contents.corpus.num_prefixes:,} n-gram prefixes of up to "
            f"{contents.corpus.max_prefix} tokens"
        )
    if contents.calibration:
        parts.append(f"{len(contents.calibration):,} rates")
    if contents.fitted is not None:
        parts.append(f"a tree of {contents.fitted.width} nodes")
    print(harmless(f"{name}: {', '.join(parts)}; tokenizer {contents.tokenizer}"))
