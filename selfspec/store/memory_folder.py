"""A folder that several processes keep what they learn in: one cache folder behind a lock.

::

    FOLDER/memory          the cache folder, replaced whole
    FOLDER/memory.damaged  the last one that could not be read
    FOLDER/lock            held by the process that writes

Only the owner can read it. Knows what is in a cache folder, not what it is good for.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from selfspec.errors import (
    CacheError,
    CacheExistsError,
    CacheFormatError,
    CacheNotFoundError,
    CacheTokenizerError,
    CacheVersionError,
    CacheWriteError,
)
from selfspec.store.card import read_card
from selfspec.store.contents import CacheContents, TokenizerInfo, is_unnamed
from selfspec.store.loading import load_cache
from selfspec.store.saving import save_cache
from selfspec.store.swap import clear_remnants
from selfspec.store.tables import check_values

_MEMORY, _DAMAGED, _LOCK = "memory", "memory.damaged", "lock"
_MAX_WAIT = 10.0  # In seconds. A save by another process takes a fraction of one.

_log = logging.getLogger("selfspec")


class MemoryFolder:
    """The folder as one process sees it. Nothing is made before the first `update`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder).expanduser().absolute()
        self._memory = self.path / _MEMORY
        self._check_names()

    def check_tokenizer(self, tokenizer: TokenizerInfo) -> None:
        """Refuses a folder of another tokenizer by its card alone; a damaged card passes."""
        try:
            card, _ = read_card(self._memory)
        except CacheError:
            return
        if not is_unnamed(card.tokenizer) and card.tokenizer.fingerprint != tokenizer.fingerprint:
            raise self.wrong_owner(card.tokenizer, tokenizer)

    def check_writable(self) -> None:
        """Refuses a folder that can't be made; warns of one that is there and can only be read."""
        made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in made:  # Nothing is there before something was learned.
                folder.rmdir()
        except OSError as error:
            raise self._unusable(error) from error
        if not made and not os.access(self.path, os.W_OK | os.X_OK):
            _log.warning("%s can only be read, so what is learned will not be kept", self.path)

    def wrong_owner(self, owner: TokenizerInfo, wanted: TokenizerInfo) -> CacheTokenizerError:
        """The error to raise for what was learned with another tokenizer."""
        return CacheTokenizerError(
            f"remember={str(self.path)!r} was learned with {owner}, this model uses {wanted}; "
            "name another folder for each tokenizer"
        )

    def read(self) -> CacheContents | None:
        """What is kept; None if nothing is, or if it is damaged, which is warned of."""
        try:
            return self._read()
        except CacheVersionError:
            raise
        except CacheError as error:
            return self._read_again(error)

    def update(self, change: Callable[[CacheContents | None], CacheContents]) -> None:
        """Replaces what is kept by what `change` makes of it; no other process writes meanwhile.

        Raises `CacheWriteError` if the folder can't be written, or is locked for too long.
        """
        from filelock import FileLock

        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(self.path / _LOCK, timeout=_MAX_WAIT, mode=0o600):
                clear_remnants(self._memory)
                save_cache(self._memory, change(self._whole()), overwrite=True, private=True)
        except OSError as error:
            raise self._unusable(error) from error

    def _check_names(self) -> None:
        """Refuses a folder of something else, before anything is put into it."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unusable(error) from error
        others = sorted(
            name
            for name in names
            if name not in (_MEMORY, _DAMAGED, _LOCK) and not name.startswith(".")
        )
        if others:
            raise CacheExistsError(
                f"remember must be a new folder or one made by it (got {str(self.path)!r}, with "
                f"{others[0]!r} in it); name another, and load a cache folder with from_pretrained"
            )

    def _unusable(self, error: OSError) -> CacheWriteError:
        return CacheWriteError(
            f"remember must be a folder that can be written (got {str(self.path)!r}: "
            f"{error.strerror or error})"
        )

    def _read(self) -> CacheContents | None:
        """What is kept, with every entry checked.

        The arrays are copies, since not every platform can replace a file that is mapped.
        """
        try:
            held = load_cache(self._memory)
        except CacheNotFoundError:
            if self._memory.exists():
                raise
            return None
        num_ids = held.count_ids() if held.num_ids is None else held.num_ids
        tables = {}
        for source, arrays in held.tables.items():
            try:
                check_values(source, arrays, num_ids)
            except ValueError as error:
                raise CacheFormatError(f"{str(self._memory)!r} is damaged: {error}") from error
            tables[source] = {name: np.array(array) for name, array in arrays.items()}
        return replace(held, tables=tables, corpus=None)

    def _read_again(self, error: CacheError) -> CacheContents | None:
        """Reads under the lock what seems damaged; what is damaged indeed is put aside."""
        from filelock import FileLock

        try:
            with FileLock(self.path / _LOCK, timeout=_MAX_WAIT, mode=0o600):
                return self._whole()
        except OSError:  # Without the right to write, it stays where it is.
            _log.warning("remember starts anew, since %s", error)
            return None

    def _whole(self) -> CacheContents | None:
        """What is kept; None if it was damaged and is now put aside. The caller holds the lock."""
        try:
            return self._read()
        except CacheVersionError:
            raise
        except CacheError as error:
            aside = self._memory.with_name(_DAMAGED)
            if aside.exists():
                shutil.rmtree(aside)
            self._memory.rename(aside)
            _log.warning("remember starts anew, and %s keeps the old folder: %s", aside, error)
            return None
