"""`selfspec cache`: builds and inspects caches."""

from __future__ import annotations

from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from selfspec.building.recipe import Recipe, read_recipe
from selfspec.cli.loading import check_options
from selfspec.cli.messages import working
from selfspec.cli.options import GENERAL, Flag, Model, ModelOptions
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


def _option(name: str) -> tuple[str, Any, None]:
    """A field for a key of a recipe; None where the option is left out."""
    key = Recipe.model_fields[name]
    about = Parameter(help=key.description, negative_iterable=())
    return name, Annotated[key.annotation | None, about], None  # type: ignore[operator]


RecipeOptions: Any = make_dataclass(
    "RecipeOptions",
    map(_option, Recipe.model_fields),
    frozen=True,
    namespace={"__module__": __name__},
)
_NO_KEYS = RecipeOptions()


@cache.command
def build(
    model: Model,
    output: Path,
    /,
    *,
    recipe: str | None = None,
    overwrite: Flag = False,
    options: ModelOptions = ModelOptions(),
    keys: Annotated[RecipeOptions, Parameter(name="*")] = _NO_KEYS,
) -> None:
    """Build a cache from texts, among them the answers of 'selfspec batch'.

    Args:
        output: The cache to make.
        recipe: code, dialogue, folder, own-answers, vocabulary, or a TOML file with the keys
            below as it names them, such as max_documents. Options override its keys.
        overwrite: Replace a cache that exists.
    """
    loading = replace(options, model=model)
    written = read_recipe(recipe) if recipe else {}
    chosen = {name: value for name, value in vars(keys).items() if value is not None}
    wanted = Recipe.of(**{**written, **chosen})
    check_options(loading)
    from selfspec.cache import check_target

    check_target(output, overwrite=overwrite, option="--overwrite")
    with working(f"Loading the tokenizer of {loading.title}"):
        from selfspec.building.build import build_cache
        from selfspec.building.texts import find_files
        from selfspec.cli.loading import load_model, load_tokenizer

        if not wanted.reads_vocabulary:
            find_files(wanted)  # Refuses a wrong path before anything is loaded.
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
    parts = [f"{len(arrays['ids']):,} {table} rows" for table, arrays in contents.tables.items()]
    if contents.answers is not None:
        parts.append(f"{(contents.answers >= 0).sum():,} tokens of texts")
    if contents.calibration:
        parts.append(f"{len(contents.calibration):,} rates")
    print(harmless(f"{name}: {', '.join(parts)}; tokenizer {contents.tokenizer}"))
