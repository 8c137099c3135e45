"""`selfspec cache`: builds, inspects and merges caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.types import PositiveInt
from rich.console import Console

from selfspec.cli.cache.recipe_options import RecipeOptions, recipe_of
from selfspec.cli.loading import check_options
from selfspec.cli.messages import say, working
from selfspec.cli.options import GENERAL, Flag, Model, ModelOptions
from selfspec.cli.paint import harmless
from selfspec.machine.memory import amount_in_bytes

if TYPE_CHECKING:
    from selfspec.cache import CacheContents

cache = App(
    name="cache",
    help="Build, inspect and merge caches.",
    group_arguments=GENERAL,
    group_parameters=GENERAL,
    sort_key=7,
)


@cache.command
def build(
    model: Model,
    output: Path,
    /,
    *,
    recipe: str | None = None,
    overwrite: Flag = False,
    asked: ModelOptions = ModelOptions(),
    options: RecipeOptions = RecipeOptions(),
) -> None:
    """Build a cache from texts, or from the model's own answers to them.

    If a build of own answers was interrupted, the same command goes on with the next answer.

    Args:
        output: The cache to make.
        recipe: code, dialogue, folder, oanc, own-answers, vocabulary, or a TOML file with the keys
            below. Options override its keys.
        overwrite: Replace a cache that exists.
    """
    loading = replace(asked, model=model)
    wanted = recipe_of(recipe, options)
    check_options(loading)
    from selfspec.cache import check_target

    check_target(output, overwrite=overwrite)
    with working(f"Loading the tokenizer of {loading.title}"):
        from selfspec.building.build import build_cache
        from selfspec.building.texts import find_files
        from selfspec.cli.loading import load_model, load_tokenizer

        if not wanted.reads_vocabulary:
            find_files(wanted)  # A wrong path is told before anything is loaded.
        tokenizer = load_tokenizer(loading)
    console = Console(stderr=True)

    def loaded_model() -> Any:
        console.print(f"Loading {loading.title} ...", highlight=False)
        return load_model(loading)

    try:
        contents = build_cache(
            wanted,
            output,
            tokenizer,
            loaded_model,
            console=console,
            model_name=loading.model,
            overwrite=overwrite,
        )
    except KeyboardInterrupt:
        if wanted.generates:
            say("Interrupted. The same command goes on with the next answer.")
        raise
    _print_contents(output, contents)
    if left_out := contents.about.get("left_out"):
        print(f"left out (empty, too long, or refused by the template): {left_out:,}")


@cache.command
def inspect(name: str, /) -> None:
    """Show what is in a cache, and where it comes from.

    Args:
        name: A cache or a Hub id.
    """
    with working(f"Reading {name}"):
        from selfspec.cache import load_cache

        contents = load_cache(name)
    _print_contents(name, contents)
    for key, value in sorted(contents.about.items()):
        print(harmless(f"{key}: {value}"))  # A card may come from anywhere, and hold anything.


@cache.command
def merge(
    output: Path,
    caches: Annotated[tuple[Path, ...], Parameter(negative=())],
    /,
    *,
    overwrite: Flag = False,
    min_count: PositiveInt = 1,
    max_continuations: PositiveInt = 8,
    max_size: str = "64MB",
) -> None:
    """Merge caches. Counts add up; of two LUT rows with one key, the later cache's is kept.

    Args:
        output: The cache to make.
        caches: Caches of one tokenizer.
        overwrite: Replace a cache that exists.
        min_count: Drop n-grams with a lower count. More: a smaller file.
        max_continuations: Continuations kept for each prefix. More: a larger file.
        max_size: Largest n-gram tables; the minimum count is raised until they fit.
    """
    size = amount_in_bytes(max_size, name="--max-size")
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
