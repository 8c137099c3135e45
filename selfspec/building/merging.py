"""Merges caches of one tokenizer: counts add up, and of LUT rows the later one is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations
from pathlib import Path

from selfspec.building.grams import merge_tables
from selfspec.cache import (
    CacheContents,
    check_target,
    file_of,
    load_cache,
    put_over,
    save_cache,
)
from selfspec.errors import BuildError


def merge_caches(
    output: Path, caches: Sequence[Path], *, overwrite: bool = False, **pruning: int
) -> CacheContents:
    """Merges caches on disk into `output`; `pruning` is what `merge_tables` takes."""
    target = check_target(output, overwrite=overwrite)
    for one, other in combinations(caches, 2):
        if file_of(one).resolve() == file_of(other).resolve():
            raise BuildError(
                "each cache to merge must be named once, since counts add up (got "
                f"{str(one)!r} and {str(other)!r})"
            )
    parts = [load_cache(each) for each in caches]
    owner = parts[0].tokenizer
    for cache, part in zip(caches, parts, strict=True):
        if part.tokenizer.fingerprint != owner.fingerprint:
            raise BuildError(
                f"caches to merge must belong to one tokenizer (got {str(caches[0])!r} of {owner} "
                f"and {str(cache)!r} of {part.tokenizer}); build them anew for one of the two"
            )
    contents = merged(parts, **pruning)
    save_cache(target, contents, overwrite=overwrite)
    return contents


def merged(parts: Sequence[CacheContents], **pruning: int) -> CacheContents:
    """One cache made of several of the same tokenizer; its card says where each came from."""
    corpora = [part.corpus for part in parts if part.corpus]
    try:
        corpus = merge_tables(corpora, **pruning) if corpora else None
    except ValueError as error:
        raise BuildError(f"the corpus tables can't be merged: {error}") from error
    return replace(
        reduce(put_over, parts, CacheContents(tokenizer=parts[0].tokenizer)),
        corpus=corpus,
        fitted=next((part.fitted for part in reversed(parts) if part.fitted), None),
        about={"merged_from": [dict(part.about) for part in parts]},
    )
