"""What a `SelfSpec` keeps from process to process, in one file: lock, load, put over it, save.

Every few minutes a thread saves a copy of what calls have taught, beside them: no call waits for
the disk, or for another process that saves. A save that fails is warned of and never ends a call.
"""

from __future__ import annotations

import glob
import logging
import os
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from selfspec.cache.contents import (
    KEY_OF,
    CacheContents,
    Tokenizer,
    TokenizerInfo,
    tokenizer_info,
)
from selfspec.cache.file import check_target, file_of, read_cache, save_cache
from selfspec.draft.calibration import Calibration
from selfspec.draft.learned import Learned
from selfspec.draft.sources import REGISTRY
from selfspec.draft.sources.texts import MAX_TOKENS
from selfspec.errors import CacheError, ConfigError, VocabularyError
from selfspec.machine.user_files import remove_scratch

SAVE_SECONDS = 300.0
_MOST_ENTRIES = 1 << 28  # More than any vocabulary needs; a file may name any token.
# In seconds. A save by another process takes a fraction of one. Only a save that is asked for, and
# the last one, wait for it.
_MAX_WAIT = 10.0

_log = logging.getLogger("selfspec")


class _Busy(CacheError):
    """Another process has the lock of the file."""


class RememberedFile:
    """The file of one `SelfSpec`, made at the first save and readable by its owner only.

    It belongs to the tokenizer. `saves` says whether anything is learned that may be saved.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: Tokenizer | TokenizerInfo | None,
        *,
        saves: bool,
    ) -> None:
        if tokenizer is None:
            raise ConfigError(
                "remember= must come with tokenizer=, the model's tokenizer, to which what is "
                "learned belongs (got None)"
            )
        self.path = Path(os.path.realpath(file_of(path)))
        self.tokenizer = tokenizer_info(tokenizer)
        self._saves = saves
        self._learned: Learned | None = None
        self._vocab_size = 0
        self._saved_at = 0.0
        self._warned = False
        self._lock = threading.Lock()
        self._kept()
        if saves:
            check_target(self.path, overwrite=True)

    def open(self, learned: Learned, vocab_size: int) -> None:
        """Adds what is kept to what was just opened, and keeps from now on what that learns.

        Of models that share a tokenizer, another one may have more ids. These stay in the file.
        """
        with self._lock:
            if (kept := self._kept()) is not None:
                restore(learned, kept.below(vocab_size), vocab_size)
                _log.info("remembered what %s keeps", self.path)
            self._learned, self._vocab_size = learned, vocab_size
            self._saved_at = time.monotonic()

    def drop(self) -> None:
        with self._lock:
            self._learned = None

    def save(self) -> None:
        """Adds to the file what is learned."""
        with self._lock:
            if (contents := self._contents()) is not None:
                self._write(contents)

    def save_if_due(self) -> None:
        """The same once in some minutes, in a thread of its own.

        Costs a copy of the tables. Another save, here or in another process, is not waited for.
        """
        if time.monotonic() - self._saved_at < SAVE_SECONDS or not self._lock.acquire(False):
            return
        beside = None
        try:
            if (contents := self._contents()) is not None:
                beside = threading.Thread(target=self._save_beside, args=[contents])
                beside.start()
        finally:
            if beside is None:
                self._lock.release()

    def _save_beside(self, contents: CacheContents) -> None:
        try:
            self._write(contents, max_wait=0.0)
        except _Busy as error:
            _log.info("what was learned is saved later: %s", error)
        except CacheError as error:
            self._warn(error)
        finally:
            self._lock.release()

    def end(self) -> None:
        """The last save, when the `SelfSpec` goes or the process ends."""
        with self._lock:
            if (contents := self._contents()) is not None:
                try:
                    self._write(contents)
                except CacheError as error:
                    self._warn(error)

    def _warn(self, error: CacheError) -> None:
        if not self._warned:
            _log.warning("what was learned is not saved: %s", error)
        self._warned = True

    def _write(self, contents: CacheContents, max_wait: float | None = None) -> None:
        """Puts contents over those of the file; raises `_Busy` if another process has its lock."""
        from filelock import FileLock, Timeout

        start, wait = time.monotonic(), _MAX_WAIT if max_wait is None else max_wait
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=wait, mode=0o600):
                # What killed writers left, since all others wait for the lock.
                remove_scratch(self.path.parent, glob.escape(self.path.name))
                kept = self._kept() or CacheContents(tokenizer=self.tokenizer)
                contents = put_over(kept, contents, self._vocab_size)
                save_cache(self.path, contents, overwrite=True, mode=0o600)
        except OSError as error:
            error_class = _Busy if isinstance(error, Timeout) else CacheError
            raise error_class(
                f"remember must be a file that can be written (got {str(self.path)!r}: "
                f"{error.strerror or error})"
            ) from error
        seconds = time.monotonic() - start
        _log.info("saved what was learned to %s in %.2f s", self.path, seconds)

    def _kept(self) -> CacheContents | None:
        return read_cache(self.path, self.tokenizer) if os.path.exists(self.path) else None

    def _contents(self) -> CacheContents | None:
        """A copy of what is learned, if it may be saved."""
        self._saved_at = time.monotonic()
        if self._learned is None or not self._saves:
            return None
        contents = contents_of(self._learned, self.tokenizer)
        return replace(contents, about={"kept_by": "remember"})


def restore(learned: Learned, contents: CacheContents, vocab_size: int) -> None:
    """Adds contents to what is learned; refuses ids that the model does not have.

    A model may have more ids than the cache: models pad their vocabularies.
    """
    num_ids = contents.count_ids()
    if vocab_size < num_ids:
        raise VocabularyError(
            f"the loaded cache holds token ids up to {num_ids - 1} and the model has a vocabulary "
            f"of {vocab_size} tokens; load a cache that was built for this model's tokenizer"
        )
    for source in learned.sources:
        if source.name in contents.tables:
            source.restore(contents.tables[source.name])
        elif source.name == "texts" and contents.answers is not None:
            source.restore({"tokens": contents.answers})
    learned.calibration.restore(contents.calibration or [])


def contents_of(learned: Learned, tokenizer: TokenizerInfo) -> CacheContents:
    """A copy of what is learned. It has no answers if no source keeps them."""
    arrays = learned.tables()
    return CacheContents(
        tokenizer=tokenizer,
        tables={name: table for name, table in arrays.items() if name in KEY_OF},
        calibration=learned.calibration.rows(),
        answers=arrays.get("texts", {}).get("tokens"),
    )


def put_over(kept: CacheContents, new: CacheContents, num_ids: int = 0) -> CacheContents:
    """Replays the new rows into tables made of what is kept, so that it never outgrows them.

    Of two rates, the one with more trials wins. The model has at least `num_ids` tokens.
    """
    # Models that share a tokenizer may pad their vocabularies differently.
    num_ids = max(num_ids, kept.count_ids(), new.count_ids())
    tables = [*kept.tables.values(), *new.tables.values()]
    top_k = max((table["ids"].shape[1] for table in tables), default=1)
    if num_ids * top_k > _MOST_ENTRIES:
        raise CacheError(
            f"tables have at most {_MOST_ENTRIES:,} entries (got {num_ids} tokens with {top_k} "
            "next ones each); leave that cache out"
        )
    both = Learned([REGISTRY[name](num_ids, top_k) for name in KEY_OF], Calibration(), top_k)
    trials = {str(row[0]): row[2] for row in kept.calibration or []}
    rates = [row for row in new.calibration or [] if row[2] >= trials.get(str(row[0]), 0)]
    restore(both, kept, num_ids)
    restore(both, replace(new, calibration=rates), num_ids)
    return replace(
        new,
        tables={name: table for name, table in both.tables().items() if len(table["ids"])},
        calibration=both.calibration.rows() or None,
        answers=_joined(kept.answers, new.answers),
    )


def _joined(*parts: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    """The answers of all, each once, the newest last; the oldest go when there are too many.

    An answer with which another one begins gives way to it: mostly it was saved while that was
    being written.
    """
    arrays = [tokens for tokens in parts if tokens is not None]
    if not arrays:
        return None
    both = np.concatenate(arrays)
    answers = np.split(both, np.flatnonzero(both == -1) + 1)
    newest_first = dict.fromkeys(answer[answer >= 0].tobytes() for answer in reversed(answers))
    # In this order the next answer begins with this one if any does.
    beginnings = {text for text, after in pairwise(sorted(newest_first)) if after.startswith(text)}
    mark = np.int32(-1).tobytes()
    data = b"".join(text + mark for text in reversed(newest_first) if text not in beginnings)
    return np.frombuffer(data, np.int32)[-MAX_TOKENS:]
