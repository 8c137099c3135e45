"""`selfspec cache`: builds and inspects caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App
from rich.console import Console

from selfspec.cli.cache.recipe_options import RecipeOptions, recipe_of
from selfspec.cli.shared.messages import working
from selfspec.cli.shared.options import GENERAL, Flag, Model, ModelOptions
from selfspec.cli.shared.paint import harmless
from selfspec.cli.shared.writer import checked

if TYPE_CHECKING:
    from selfspec.cache import CacheContents

cache = App(
    name="cache",
    help="Build and inspect caches.",
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
    """Build a cache from texts, among them the answers of 'selfspec batch'.

    Args:
        output: The cache to make.
        recipe: code, dialogue, folder, oanc, own-answers, vocabulary, or a TOML file with the keys
            below. Options override its keys.
        overwrite: Replace a cache that exists.
    """
    loading = replace(asked, model=model)
    wanted = checked(loading, recipe_of(recipe, options))
    from selfspec.cache import check_target

    check_target(output, overwrite=overwrite)
    with working(f"Loading the tokenizer of {loading.title}"):
        from selfspec.building.build import build_cache
        from selfspec.building.texts import find_files
        from selfspec.cli.shared.model_loading import load_model, load_tokenizer

        if not wanted.reads_vocabulary:
            find_files(wanted)  # A wrong path is told before anything is loaded.
        tokenizer = load_tokenizer(loading)
    console = Console(stderr=True)

    def loaded_model() -> Any:
        console.print(f"Loading {loading.title} ...", highlight=False)
        return load_model(loading)

    contents = build_cache(
        wanted,
        output,
        tokenizer,
        loaded_model,
        console=console,
        model_name=loading.model,
        overwrite=overwrite,
    )
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
    print(harmless(f"{name}: {', '.join(parts)}; tokenizer {contents.tokenizer}"))
