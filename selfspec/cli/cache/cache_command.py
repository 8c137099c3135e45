"""`selfspec cache`: builds, inspects, merges and checks cache folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from selfspec.cli.cache.build_command import build
from selfspec.cli.shared.messages import show_log, working
from selfspec.cli.shared.options import Flag, Verbose
from selfspec.cli.shared.paint import harmless, readable
from selfspec.cli.shared.text_files import read_text
from selfspec.errors import CliError, one_line

if TYPE_CHECKING:
    from selfspec.cli.cache.coverage import Coverage
    from selfspec.store import CacheContents, Card

_DAMAGED = 2

cache = App(name="cache", help="Build, inspect, merge and check cache folders.", sort_key=7)
cache.command(build)


@cache.command
def inspect(
    folder: str,
    /,
    *,
    tokenizer: str | None = None,
    text: Path | None = None,
    top: NonNegativeInt = 5,
    verbose: Verbose = False,
) -> None:
    """Show what is in a cache: its origin, counts, sizes, top entries, coverage of a text.

    Args:
        folder: A cache folder or a Hub id.
        tokenizer: Folder or Hub id of the tokenizer, to show text for token ids.
        text: Text file; show how much of it the cache knows. Needs --tokenizer.
        top: Entries to show for each table.
        verbose: Also say on stderr what is prepared, and how long that takes.
    """
    show_log(verbose)
    if text is not None and tokenizer is None:
        raise CliError("--text needs --tokenizer: a cache knows token ids, not text")
    known = None if text is None else read_text(text, "--text")
    with working(f"Reading {folder}"):
        from selfspec.store import load_cache, locate, read_card

        path = locate(folder)
        _check(path)
        reader = _tokenizer(tokenizer)
        contents = load_cache(path, tokenizer=reader)
    _print_card(path, read_card(path)[0])
    _print_top(contents, reader, top)
    if known is not None:
        ids = reader(known, add_special_tokens=False, verbose=False)["input_ids"]
        _print_coverage(contents, ids)


@cache.command
def merge(
    output: Path,
    folders: Annotated[tuple[Path, ...], Parameter(negative=())],
    /,
    *,
    overwrite: Flag = False,
    min_count: PositiveInt = 1,
    max_continuations: PositiveInt = 8,
    max_size: str = "64MB",
    verbose: Verbose = False,
) -> None:
    """Merge caches. Counts add up; of two LUT rows with one key, the later folder's is kept.

    Args:
        output: The cache folder to make.
        folders: Cache folders of one tokenizer.
        overwrite: Replace a cache folder that exists already.
        min_count: Drop n-grams with a lower count. More: a smaller file.
        max_continuations: Continuations kept for each prefix. More: a larger file.
        max_size: The largest n-gram file; the minimum count is raised until it fits.
        verbose: Also say on stderr what is prepared, and how long that takes.
    """
    show_log(verbose)
    from selfspec.machine.memory import amount_in_bytes

    pruning = {
        "min_count": min_count,
        "max_continuations": max_continuations,
        "max_bytes": amount_in_bytes(max_size, name="--max-size"),
    }
    with working(f"Merging into {output}"):
        from selfspec.cli.cache.merging import merged
        from selfspec.store import check_target, save_cache

        check_target(output, overwrite=overwrite)
        parts = _sound(folders)
        save_cache(output, merged(parts, **pruning), overwrite=overwrite)
    print(f"{len(parts)} caches are merged in {output}")


@cache.command
def verify(folder: Path, /, *, verbose: Verbose = False) -> int:
    """Check every byte and every entry of a cache. The exit status is 2 if it is damaged.

    Args:
        folder: A cache folder.
        verbose: Also say on stderr what is prepared, and how long that takes.
    """
    show_log(verbose)
    with working(f"Checking {folder}"):
        from selfspec.store import verify_cache

        verdicts = verify_cache(folder)
    for name, problem in verdicts.items():
        print(f"{name}: {'ok' if problem is None else f'DAMAGED: {one_line(problem)}'}")
    return 0 if verdicts.ok else _DAMAGED


def _sound(folders: Sequence[Path]) -> list[CacheContents]:
    """The caches, checked in full: all of one tokenizer, and none given twice."""
    from selfspec.cli.cache.merging import check_different, check_one_tokenizer
    from selfspec.store import load_cache, read_card

    cards = {folder: read_card(folder)[0] for folder in folders}
    check_different(folders, cards)
    for folder in folders:
        _check(folder)
    check_one_tokenizer(cards)
    return [load_cache(folder) for folder in folders]


def _check(folder: Path) -> None:
    """Refuses a cache whose tables aren't sound. What follows reads every entry of them."""
    from selfspec.store import verify_cache

    for problem in verify_cache(folder).values():
        if problem is not None:
            raise problem


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    from selfspec.cli.shared.model_loading import attempt

    return attempt(name, "tokenizer", lambda: AutoTokenizer.from_pretrained(name))


def _print_card(folder: Path, card: Card) -> None:
    import json

    _say(f"cache {folder}")
    _say(f"tokenizer {card.tokenizer}, {card.tokenizer.vocab_size:,} tokens")
    for name, entry in sorted(card.files.items()):
        _say(f"{name}: {entry.size:,} bytes")
    for name, number in sorted(card.counts.items()):
        _say(f"{name}: {number:,}")
    _say(f"entries of a LUT row: {card.top_k or '-'}, longest prefix: {card.max_prefix or '-'}")
    for name, value in sorted(card.about.items()):
        _say(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")


def _print_top(contents: CacheContents, tokenizer: Any, limit: int) -> None:
    from selfspec.cli.cache.top_entries import top_entries

    for title, entries in top_entries(contents, limit) if limit else ():
        _say(f"\n{title}:")
        for entry in entries:
            before, after = (_shown(ids, tokenizer) for ids in (entry.before, entry.after))
            _say(f"  {before} -> {after}  ({entry.weight})")


def _shown(token_ids: tuple[int, ...], tokenizer: Any) -> str:
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
