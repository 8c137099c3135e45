"""Checks a cache folder in full: every byte, and every entry of every table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from selfspec.errors import CacheCardError, CacheError, CacheFormatError
from selfspec.store.card import CARD_FILE, CORPUS_FILE, LUT_FILE, Card, read_card
from selfspec.store.corpus_check import check_corpus
from selfspec.store.loading import contents_of, read_file
from selfspec.store.memo import Memo
from selfspec.store.tables import check_values

_EVERY_TIME = Memo(None)


@dataclass(frozen=True)
class FileReport:
    """The verdict on one file; `problem` is None if it is sound."""

    name: str
    size: int
    problem: CacheError | None = None


@dataclass(frozen=True)
class CacheReport:
    """The verdicts on all files of a folder, the card's last."""

    folder: Path
    card: Card
    files: tuple[FileReport, ...]

    @property
    def ok(self) -> bool:
        """Is every file as it was written?"""
        return all(file.problem is None for file in self.files)


def verify_cache(folder: str | Path) -> CacheReport:
    """Reads every file in full, even those known to be sound. Raises if there is no card."""
    folder = Path(folder).expanduser()
    card, data = read_card(folder)
    held: dict[str, Any] = {}
    reports = []
    for name in sorted(card.files):
        problem = _attempt(partial(_check_file, folder, card, name, held))
        reports.append(FileReport(name, card.files[name].size, problem))
    whole = len(held) == len(card.files)
    problem = _attempt(lambda: _check_card(folder, card, held)) if whole else None
    reports.append(FileReport(CARD_FILE, len(data), problem))
    return CacheReport(folder, card, tuple(reports))


def _attempt(check: Callable[[], None]) -> CacheError | None:
    try:
        check()
    except CacheError as error:
        return error
    return None


def _check_file(folder: Path, card: Card, name: str, held: dict[str, Any]) -> None:
    """Checks a file and what it holds, and adds that to `held`."""
    found = read_file(folder, card, name, _EVERY_TIME)
    try:
        if name == LUT_FILE:
            for source, arrays in found.items():
                check_values(source, arrays, card.num_ids)
        if name == CORPUS_FILE:
            check_corpus(found.arrays(), found.max_prefix, card.num_ids)
    except ValueError as error:
        raise CacheFormatError(
            f"{name} of cache {str(folder)!r} is no sound table: {error}"
        ) from error
    held[name] = found


def _check_card(folder: Path, card: Card, held: dict[str, Any]) -> None:
    """Checks what the card says about the files, which must be sound."""
    found = contents_of(card, held).facts()
    said = {name: getattr(card, name) for name in found}
    if found != said:
        raise CacheCardError(
            f"{CARD_FILE} of cache {str(folder)!r} must say what the files hold: {found} "
            f"(got {said})"
        )
