"""Checks a cache folder in full: every byte, and every entry of every table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.errors import CacheCardError, CacheError, CacheFormatError
from selfspec.store.card import CARD_FILE, CORPUS_FILE, LUT_FILE, Card, read_card
from selfspec.store.contents import Arrays
from selfspec.store.loading import contents_of, read_file
from selfspec.store.memo import Memo
from selfspec.store.tables import check_values

_EVERY_TIME = Memo(None)


class Verdicts(dict[str, CacheError | None]):
    """The problem of each file of a folder, the card's last; None for a file that is sound."""

    @property
    def ok(self) -> bool:
        """Is every file as it was written?"""
        return not any(self.values())


def verify_cache(folder: str | Path) -> Verdicts:
    """Reads every file in full, even those known to be sound. Raises if there is no card."""
    folder = Path(folder).expanduser()
    card, _ = read_card(folder)
    held: dict[str, Any] = {}
    verdicts = Verdicts()
    for name in [*sorted(card.files), CARD_FILE]:
        problem = None
        try:
            if name in card.files:
                held[name] = _checked_file(folder, card, name)
            elif verdicts.ok:
                _check_card(folder, card, held)
        except CacheError as error:
            problem = error
        verdicts[name] = problem
    return verdicts


def _checked_file(folder: Path, card: Card, name: str) -> Any:
    """What a file holds, every entry of it checked."""
    found = read_file(folder, card, name, _EVERY_TIME)
    try:
        if name == LUT_FILE:
            for source, arrays in found.items():
                check_values(source, arrays, card.num_ids)
        if name == CORPUS_FILE:
            _check_corpus(found.arrays(), found.max_prefix, card.num_ids)
    except ValueError as error:
        raise CacheFormatError(
            f"{name} of cache {str(folder)!r} is no sound table: {error}"
        ) from error
    return found


def _check_card(folder: Path, card: Card, held: dict[str, Any]) -> None:
    """Checks what the card says about the files, which must be sound."""
    found = contents_of(card, held).facts()
    said = {name: getattr(card, name) for name in found}
    if found != said:
        raise CacheCardError(
            f"{CARD_FILE} of cache {str(folder)!r} must say what the files hold: {found} "
            f"(got {said})"
        )


def _check_corpus(arrays: Arrays, max_prefix: int, num_ids: int) -> None:
    """Checks that the trie is sorted and complete and the counts are sound; reads all of it once.

    Raises `ValueError`, which says what must hold at which level.
    """
    starts = np.zeros(1, np.int64)  # All of level 1 have one parent.
    for level in range(1, max_prefix + 1):
        tokens = arrays[f"token.{level}"]
        _check_ids(f"token.{level}", tokens, num_ids)
        if (_steps_inside(tokens, starts) <= 0).any():
            raise ValueError(f"token.{level} must be sorted below each parent, none twice")
        _check_continuations(arrays, level, num_ids)
        if level < max_prefix:
            starts = arrays[f"child.{level}"].astype(np.int64)
            _check_offsets(f"child.{level}", starts, len(arrays[f"token.{level + 1}"]))


def _check_continuations(arrays: Arrays, level: int, num_ids: int) -> None:
    tokens, counts = arrays[f"next_token.{level}"], arrays[f"next_count.{level}"]
    starts = arrays[f"next.{level}"].astype(np.int64)
    _check_offsets(f"next.{level}", starts, len(tokens))
    _check_ids(f"next_token.{level}", tokens, num_ids)
    if (counts == 0).any():
        raise ValueError(f"next_count.{level} must be >= 1 everywhere")
    rank = -counts.astype(np.int64) * (num_ids + 1) + tokens
    if (_steps_inside(rank, starts) <= 0).any():
        raise ValueError(f"next_token.{level} must have the most frequent first, ties by id")
    sums = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if (sums[starts[1:]] - sums[starts[:-1]] > arrays[f"total.{level}"]).any():
        raise ValueError(f"total.{level} must cover the counts of the continuations")


def _check_ids(name: str, ids: NDArray[Any], num_ids: int) -> None:
    if ids.size and int(ids.max()) >= num_ids:
        raise ValueError(f"{name} must be below {num_ids} (got {ids.max()})")


def _check_offsets(name: str, offsets: NDArray[np.int64], end: int) -> None:
    if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name} must rise from 0 to {end}")


def _steps_inside(values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The differences of neighbours that have the same parent."""
    numbers: NDArray[np.int64] = values.astype(np.int64)
    inside = np.ones(len(values) + 1, bool)
    inside[starts] = False
    return (numbers[1:] - numbers[:-1])[inside[1 : len(values)]]
