"""`selfspec cache`: builds and inspects caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from selfspec.building.recipe import OPTIONS, Recipe, read_recipe
from selfspec.cli.loading import check_options
from selfspec.cli.messages import working
from selfspec.cli.options import GENERAL, Flag, Model, ModelOptions, record
from selfspec.cli.paint import harmless

if TYPE_CHECKING:
    from selfspec.cache import CacheContents

cache = App(
    name="cache",
    help="Build and inspect caches.",
    group_arguments=GENERAL,
    group_parameters=GENERAL,
    sort_key=7,
)


_KINDS = {
    "chat_template": bool,
    "data_files": tuple[str, ...],
    "max_documents": int,
    "warmup_tokens": int,
}


class _Given:
    def given(self) -> dict[str, Any]:
        """The keys that were set, as a recipe has them."""
        held = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in held.items()}


def _option(name: str) -> tuple[str, Any, Any]:
    """An option that leaves a key to the recipe or its default where it is not given."""
    field, kind = Recipe.model_fields[name], _KINDS.get(name, str)
    parameter = Parameter(help=field.description, negative=None if kind is bool else ())
    return name, Annotated[kind | None, parameter], None


if TYPE_CHECKING:
    RecipeOptions = _Given
else:
    RecipeOptions = record("RecipeOptions", map(_option, OPTIONS), _Given)
_NONE_GIVEN = RecipeOptions()


@cache.command
def build(
    model: Model,
    output: Path,
    /,
    *,
    recipe: str | None = None,
    overwrite: Flag = False,
    asked: ModelOptions = ModelOptions(),
    options: RecipeOptions = _NONE_GIVEN,
) -> None:
    """Build a cache from texts, among them the answers of 'selfspec batch'.

    Args:
        output: The cache to make.
        recipe: code, dialogue, folder, oanc, own-answers, vocabulary, or a TOML file with the keys
            below. Options override its keys.
        overwrite: Replace a cache that exists.
    """
    loading = replace(asked, model=model)
    wanted = _recipe_of(recipe, options)
    check_options(loading)
    from selfspec.cache import check_target

    check_target(output, overwrite=overwrite, option="--overwrite")
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


def _recipe_of(name_or_path: str | None, options: RecipeOptions) -> Recipe:
    """The recipe of this name or in this file; options replace its keys."""
    keys = read_recipe(name_or_path) if name_or_path else {}
    return Recipe.of(**{**keys, **options.given()})


def _print_contents(name: object, contents: CacheContents) -> None:
    """A line on what is in a cache."""
    parts = [f"{len(arrays['ids']):,} {table} rows" for table, arrays in contents.tables.items()]
    if contents.corpus is not None:
        parts.append(
            f"{contents.corpus.num_prefixes:,} n-gram prefixes of up to "
            f"{contents.corpus.max_prefix} tokens"
        )
    if contents.map_prior is not None:
        parts.append(f"a map of states of {contents.map_prior['up'].shape[1]:,} numbers")
    if contents.calibration:
        parts.append(f"{len(contents.calibration):,} rates")
    print(harmless(f"{name}: {', '.join(parts)}; tokenizer {contents.tokenizer}"))
