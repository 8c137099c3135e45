"""`selfspec cache`: builds and inspects caches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App
from cyclopts.types import NonNegativeInt

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


@cache.command
def build(
    model: Model,
    output: Path,
    /,
    *,
    data: str,
    warmup_tokens: NonNegativeInt = 1_000_000,
    overwrite: Flag = False,
    options: ModelOptions = ModelOptions(),
) -> None:
    """Build a cache from texts, among them the answers of 'selfspec batch'.

    Args:
        output: The cache to make.
        data: A file, a folder or a glob: text files, or .jsonl with ids, a text or messages in each
            line.
        warmup_tokens: The most tokens that the model reads. 0: only texts are kept.
        overwrite: Replace a cache that exists.
    """
    from selfspec.building.texts import find_files
    from selfspec.cache import check_target, save_cache

    loading = replace(options, model=model)
    check_options(loading)
    check_target(output, overwrite=overwrite, option="--overwrite")
    find_files(data)  # Refuses a wrong path before anything is loaded.
    with working(f"Loading {loading.title}") as say:
        from selfspec.building.build import build_cache
        from selfspec.cli.loading import load_model, load_tokenizer

        contents = build_cache(
            data,
            load_tokenizer(loading),
            partial(load_model, loading),
            num_tokens=warmup_tokens,
            say=say,
        )
    save_cache(output, contents, overwrite=overwrite)
    _print_contents(output, contents)
    if left_out := contents.about.get("left_out"):
        print(f"left out (empty, or refused by the template): {left_out:,}")


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
