"""Opens a cache folder: card, tokenizer, then each file's size and checksum, then its tables.

Small tables are read into memory, and large ones stay on disk as views into a memory map. Once the
checksums have been taken, opening a folder costs a few milliseconds for any size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from selfspec.draft.fitted import FittedTree
from selfspec.draft.sources.corpus import CorpusTables
from selfspec.errors import CacheError, CacheFormatError, CacheTokenizerError
from selfspec.store.card import (
    CALIBRATION_FILE,
    CORPUS_FILE,
    FITTED_FILE,
    LUT_FILE,
    Card,
    read_card,
)
from selfspec.store.contents import CacheContents, TokenizerInfo, tokenizer_info
from selfspec.store.files import opened
from selfspec.store.hub import locate
from selfspec.store.memo import Memo, memo_path
from selfspec.store.swap import is_being_swapped
from selfspec.store.tables import check_rates, split
from selfspec.store.tensors import read_tensors

_MAX_TRIES = 100
_PAUSE = 0.005  # In seconds, while a writer is between two renames.


def load_cache(
    folder_or_hub_id: str | Path, *, revision: str | None = None, tokenizer: Any = None
) -> CacheContents:
    """Loads a cache folder or a repository of the Hub; refuses one that is not whole.

    With `tokenizer` a cache of another tokenizer is refused. Each version of a file is read in full
    once, and its checksum remembered. The arrays are read-only; all processes that load the folder
    share those of large files.
    """
    folder = locate(folder_or_hub_id, revision)
    wanted = None if tokenizer is None else tokenizer_info(tokenizer)
    for _ in range(_MAX_TRIES):
        before = _identity(folder)
        try:
            return _load(folder, wanted)
        except CacheError:
            if is_being_swapped(folder):
                time.sleep(_PAUSE)
            elif _identity(folder) == before:  # Otherwise it was replaced meanwhile.
                raise
    return _load(folder, wanted)


def check_tokenizer(name: str, owner: TokenizerInfo, wanted: TokenizerInfo) -> None:
    """Refuses a cache that was built for another tokenizer."""
    if owner.fingerprint != wanted.fingerprint:
        raise CacheTokenizerError(
            f"{name} was built for tokenizer {owner}, this model uses "
            f"{wanted}; rebuild it with 'selfspec cache build'"
        )


def contents_of(card: Card, held: Mapping[str, Any]) -> CacheContents:
    """What a folder holds, put together from what its files do."""
    return CacheContents(
        tokenizer=card.tokenizer,
        tables=held.get(LUT_FILE) or {},
        corpus=held.get(CORPUS_FILE),
        calibration=held.get(CALIBRATION_FILE),
        fitted=held.get(FITTED_FILE),
        about=card.about,
        num_ids=card.num_ids,
    )


def read_file(folder: Path, card: Card, name: str, memo: Memo) -> Any:
    """What one file holds."""
    entry = card.files[name]
    with opened(folder, name, entry, memo) as file:
        try:
            return _READERS[name](file, entry.size)
        except (ValueError, RecursionError) as error:
            raise CacheFormatError(
                f"{name} of cache {str(folder)!r} must hold {error}; build it anew"
            ) from error


def _load(folder: Path, wanted: TokenizerInfo | None) -> CacheContents:
    card, _ = read_card(folder)
    if wanted is not None:
        check_tokenizer(f"cache {str(folder)!r}", card.tokenizer, wanted)
    memo = Memo(memo_path())
    return contents_of(card, {name: read_file(folder, card, name, memo) for name in card.files})


def _identity(folder: Path) -> tuple[int, int] | None:
    """A value that changes when the folder is replaced, even by one with the same contents."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _read_json(file: BinaryIO, size: int) -> Any:
    return json.loads(file.read(size).decode("utf-8"))


_READERS: dict[str, Callable[[BinaryIO, int], Any]] = {
    LUT_FILE: lambda file, size: split(read_tensors(file, size)),
    CORPUS_FILE: lambda file, size: CorpusTables.from_arrays(read_tensors(file, size)),
    CALIBRATION_FILE: lambda file, size: check_rates(_read_json(file, size)),
    FITTED_FILE: lambda file, size: FittedTree.from_dict(_read_json(file, size)),
}
