"""Merges caches of one tokenizer: counts add up, and of LUT rows the later one is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from filecmp import cmp
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.cache import KEY_OF, Arrays, CacheContents, flat_keys
from selfspec.draft.sources.corpus import CorpusTables
from selfspec.errors import CliError

Rates = list[list[Any]]


def check_different(paths: Sequence[Path]) -> None:
    """Refuses a cache that is given twice, through a link or as a copy: it would count twice."""
    for one, other in combinations(paths, 2):
        if one.samefile(other) or cmp(one, other, shallow=False):
            raise CliError(
                f"CACHES must name each cache once (got {str(one)!r} and {str(other)!r}, which "
                "hold the same)"
            )


def check_one_tokenizer(parts: Mapping[Path, CacheContents]) -> None:
    """Refuses caches that were built for different tokenizers, whose ids mean different things."""
    (first, owner), *others = ((path, part.tokenizer) for path, part in parts.items())
    for path, tokenizer in others:
        if tokenizer.fingerprint != owner.fingerprint:
            raise CliError(
                f"CACHES must belong to one tokenizer (got {str(first)!r} of {owner} and "
                f"{str(path)!r} of {tokenizer}); build them anew for one of the two"
            )


def merged(parts: Sequence[CacheContents], **pruning: int) -> CacheContents:
    """One cache made of several of the same tokenizer; its card says where each came from."""
    tables = {}
    for source in KEY_OF:
        held = [part.tables[source] for part in parts if source in part.tables]
        if held:
            tables[source] = _merge_rows(KEY_OF[source], held)
    return CacheContents(
        tokenizer=parts[0].tokenizer,
        tables=tables,
        corpus=_merge_corpora([part.corpus for part in parts if part.corpus], pruning),
        calibration=_merge_rates([part.calibration for part in parts if part.calibration]),
        fitted=next((part.fitted for part in reversed(parts) if part.fitted), None),
        about={"merged_from": [dict(part.about) for part in parts]},
    )


def _merge_corpora(corpora: Sequence[CorpusTables], pruning: dict[str, int]) -> CorpusTables | None:
    from selfspec.building.grams import merge_tables

    if not corpora:
        return None
    try:
        return merge_tables(corpora, **pruning)
    except ValueError as error:
        raise CliError(f"the corpus tables can't be merged: {error}") from error


def _merge_rows(key: str, parts: Sequence[Arrays]) -> Arrays:
    """All rows, sorted by key; of a key that several parts have, the last part's row."""
    width = max(part["ids"].shape[1] for part in parts)
    keys = np.concatenate([part[key] for part in parts])
    last = _last_of_each(keys)
    ids = np.concatenate([_widened(part["ids"], width, -1) for part in parts])
    probabilities = np.concatenate([_widened(part["probabilities"], width, 0) for part in parts])
    return {key: keys[last], "ids": ids[last], "probabilities": probabilities[last]}


def _last_of_each(keys: NDArray[Any]) -> NDArray[np.int64]:
    """The index at which each key comes last, in the order of the keys."""
    flat = flat_keys(keys)
    _, first = np.unique(flat[::-1], return_index=True)
    last: NDArray[np.int64] = len(flat) - 1 - first
    return last


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
