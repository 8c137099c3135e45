"""`selfspec cache`: builds and inspects caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
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


def _key(name: str, negative: tuple[str, ...] | None = ()) -> Parameter:
    return Parameter(help=Recipe.model_fields[name].description, negative=negative)


_Text = str | None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The keys of a recipe that are options too; the others are set in a file."""

    data: Annotated[_Text, _key("data")] = None
    data_files: Annotated[tuple[str, ...] | None, _key("data_files")] = None
    split: Annotated[_Text, _key("split")] = None
    column: Annotated[_Text, _key("column")] = None
    messages: Annotated[_Text, _key("messages")] = None
    form: Annotated[_Text, _key("form")] = None
    chat_template: Annotated[bool | None, _key("chat_template", negative=None)] = None
    max_documents: Annotated[int | None, _key("max_documents")] = None
    build: Annotated[_Text, _key("build")] = None
    warmup_tokens: Annotated[int | None, _key("warmup_tokens")] = None

    def given(self) -> dict[str, Any]:
        held = {name: value for name, value in vars(self).items() if value is not None}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in held.items()}


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
        recipe: code, dialogue, folder, own-answers, vocabulary, or a TOML file with the keys
            below. Options override its keys.
        overwrite: Replace a cache that exists.
    """
    loading = replace(asked, model=model)
    keys = read_recipe(recipe) if recipe else {}
    wanted = Recipe.of(**{**keys, **options.given()})
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
