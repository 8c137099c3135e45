"""Merges caches of one tokenizer: counts add up, and of LUT rows the later one is kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.building.grams import merge_tables
from selfspec.cache import (
    KEY_OF,
    Arrays,
    CacheContents,
    check_target,
    file_of,
    load_cache,
    save_cache,
)
from selfspec.draft.sources.corpus import CorpusTables
from selfspec.errors import BuildError

Rates = list[list[Any]]


def merge_caches(
    output: Path, caches: Sequence[Path], *, overwrite: bool = False, **pruning: int
) -> CacheContents:
    """Merges caches on disk into `output`; `pruning` is what `merge_tables` takes."""
    target = check_target(output, overwrite=overwrite)
    _check_different(caches)
    parts = [load_cache(each) for each in caches]
    _check_one_tokenizer(caches, parts)
    contents = merged(parts, **pruning)
    save_cache(target, contents, overwrite=overwrite)
    return contents


def merged(parts: Sequence[CacheContents], **pruning: int) -> CacheContents:
    """One cache made of several of the same tokenizer; its card says where each came from."""
    tables = {}
    for source in KEY_OF:
        held = [part.tables[source] for part in parts if source in part.tables]
        if held:
            tables[source] = _merge_rows(KEY_OF[source], held)
    corpora = [part.corpus for part in parts if part.corpus]
    return CacheContents(
        tokenizer=parts[0].tokenizer,
        tables=tables,
        corpus=_merge_corpora(corpora, pruning),
        calibration=_merge_rates([part.calibration for part in parts if part.calibration]),
        fitted=next((part.fitted for part in reversed(parts) if part.fitted), None),
        about={"merged_from": [dict(part.about) for part in parts]},
    )


def _check_different(caches: Sequence[Path]) -> None:
    """Refuses a cache that is given twice: it would count twice."""
    for one, other in combinations(caches, 2):
        if file_of(one).resolve() == file_of(other).resolve():
            raise BuildError(
                "each cache to merge must be named once, since counts add up (got "
                f"{str(one)!r} and {str(other)!r})"
            )


def _check_one_tokenizer(caches: Sequence[Path], parts: Sequence[CacheContents]) -> None:
    """Refuses caches that were built for different tokenizers, whose ids mean different things."""
    owner = parts[0].tokenizer
    for cache, part in zip(caches, parts, strict=True):
        if part.tokenizer.fingerprint != owner.fingerprint:
            raise BuildError(
                f"caches to merge must belong to one tokenizer (got {str(caches[0])!r} of {owner} "
                f"and {str(cache)!r} of {part.tokenizer}); build them anew for one of the two"
            )


def _merge_corpora(corpora: Sequence[CorpusTables], pruning: dict[str, int]) -> CorpusTables | None:
    try:
        return merge_tables(corpora, **pruning) if corpora else None
    except ValueError as error:
        raise BuildError(f"the corpus tables can't be merged: {error}") from error


def _merge_rows(key: str, parts: Sequence[Arrays]) -> Arrays:
    """All rows, sorted by key; of a key that several parts have, the last part's row."""
    width = max(part["ids"].shape[1] for part in parts)
    keys = np.concatenate([part[key] for part in parts])
    flat = keys.astype(np.int64)
    if flat.ndim == 2:
        flat = (flat[:, 0] << 32) + flat[:, 1]
    _, first = np.unique(flat[::-1], return_index=True)
    last = len(flat) - 1 - first
    ids = np.concatenate([_widened(part["ids"], width, -1) for part in parts])
    probabilities = np.concatenate([_widened(part["probabilities"], width, 0) for part in parts])
    return {key: keys[last], "ids": ids[last], "probabilities": probabilities[last]}


def _widened(rows: NDArray[Any], width: int, fill: int) -> NDArray[Any]:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill)


def _merge_rates(parts: Sequence[Rates]) -> Rates | None:
    """The sums of hits and trials for each kind of evidence."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for rows in parts:
        for kinds, hits, trials in rows:
            total = sums.setdefault(tuple(map(tuple, kinds)), [0.0, 0.0])
            total[0] += hits
            total[1] += trials
    return [[list(map(list, kinds)), *total] for kinds, total in sorted(sums.items())] or None
