"""`selfspec cache`: builds, inspects and merges caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.cache.build_command import Overwrite, build
from selfspec.cli.shared.group import Commands
from selfspec.cli.shared.messages import Verbose, working
from selfspec.cli.shared.paint import harmless
from selfspec.cli.shared.text_files import read_text
from selfspec.errors import CliError

if TYPE_CHECKING:
    from selfspec.cache import CacheContents
    from selfspec.cli.cache.coverage import Coverage

cache = typer.Typer(name="cache", cls=Commands)
cache.command()(build)


@cache.callback(invoke_without_command=True)
def commands(context: typer.Context) -> None:
    """Build, inspect and merge caches."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@cache.command()
def inspect(
    name: Annotated[str, typer.Argument(metavar="CACHE", help="A cache or a Hub id.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or Hub id of the tokenizer, to show text for token ids."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file; show how much of it the cache knows. Needs --tokenizer."),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Entries to show for each table.")] = 5,
    verbose: Verbose = False,
) -> None:
    """Show what is in a cache: its origin, counts, sizes, top entries, coverage of a text."""
    if text is not None and tokenizer is None:
        raise CliError("--text needs --tokenizer: a cache knows token ids, not text")
    known = None if text is None else read_text(text, "--text")
    with working(f"Reading {name}"):
        from selfspec.cache import load_cache, locate

        path = locate(name)
        reader = _tokenizer(tokenizer)
        contents = load_cache(path, tokenizer=reader)
    _print_card(path, contents)
    _print_top(contents, reader, top)
    if known is not None:
        ids = reader(known, add_special_tokens=False, verbose=False)["input_ids"]
        _print_coverage(contents, ids)


@cache.command()
def merge(
    output: Annotated[Path, typer.Argument(help="The cache to make.")],
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
        typer.Option(help="The largest n-gram file; the minimum count is raised until it fits."),
    ] = "64MB",
    verbose: Verbose = False,
) -> None:
    """Merge caches. Counts add up; of two LUT rows with one key, the later cache's is kept."""
    from selfspec.machine.memory import amount_in_bytes

    pruning = {
        "min_count": min_count,
        "max_continuations": max_continuations,
        "max_bytes": amount_in_bytes(max_size, name="--max-size"),
    }
    with working(f"Merging into {output}"):
        from selfspec.cache import check_target, save_cache
        from selfspec.cli.cache.merging import merged

        check_target(output, overwrite=overwrite)
        parts = _loaded(caches)
        save_cache(output, merged(parts, **pruning), overwrite=overwrite)
    print(f"{len(parts)} caches are merged in {output}")


def _loaded(caches: list[Path]) -> list[CacheContents]:
    """The caches: all of one tokenizer, and none given twice."""
    from selfspec.cache import load_cache, locate
    from selfspec.cli.cache.merging import check_different, check_one_tokenizer

    parts = {each: load_cache(each) for each in caches}
    check_different([locate(each) for each in caches])
    check_one_tokenizer(parts)
    return list(parts.values())


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    from selfspec.cli.shared.model_loading import attempt

    return attempt(name, "tokenizer", lambda: AutoTokenizer.from_pretrained(name))


def _print_card(path: Path, contents: CacheContents) -> None:
    import json

    _say(f"cache {path}: {path.stat().st_size:,} bytes")
    _say(f"tokenizer {contents.tokenizer}, {contents.tokenizer.vocab_size:,} tokens")
    for name, table in sorted(contents.tables.items()):
        _say(f"{name}: {len(table['ids']):,} rows of {table['ids'].shape[1]}")
    if (corpus := contents.corpus) is not None:
        _say(f"prefixes: {corpus.num_prefixes:,} of at most {corpus.max_prefix} tokens")
        _say(f"continuations: {corpus.num_continuations:,}")
    if contents.calibration:
        _say(f"calibration: {len(contents.calibration):,}")
    if contents.fitted is not None:
        _say(f"fitted tree: {contents.fitted.width} nodes")
    for name, value in sorted(contents.about.items()):
        _say(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")


def _print_top(contents: CacheContents, tokenizer: Any, limit: int) -> None:
    from selfspec.cli.cache.top_entries import top_entries

    for title, entries in top_entries(contents, limit) if limit else ():
        _say(f"\n{title}:")
        for entry in entries:
            before, after = (_shown(ids, tokenizer) for ids in (entry.before, entry.after))
            _say(f"  {before} -> {after}  ({entry.weight})")


def _shown(token_ids: tuple[int, ...], tokenizer: Any) -> str:
    from selfspec.cli.demo.tree_view import readable

    if tokenizer is None:
        return " ".join(map(str, token_ids))
    return " ".join(readable(tokenizer, token_id) for token_id in token_ids)


def _print_coverage(contents: CacheContents, token_ids: list[int]) -> None:
    from selfspec.cli.cache.coverage import coverage

    _say(f"\ncoverage of {len(token_ids):,} tokens (found: something is known there; named: the")
    _say("next token is among it):")
    for line in coverage(contents, token_ids):
        found, named = _share(line, line.num_found), _share(line, line.num_named)
        _say(f"  {line.what:<17} {found} found, {named} named")


def _share(line: Coverage, number: int) -> str:
    return f"{number / line.num_positions:6.1%}" if line.num_positions else "     -"


def _say(line: str) -> None:
    """Prints a line that may hold anything, since a card may come from anywhere."""
    print(harmless(line))
