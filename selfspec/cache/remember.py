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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.cache.contents import KEY_OF, Arrays, CacheContents, tokenizer_info
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
    """The file of one `SelfSpec`, and which part of what it learned is in there already.

    It is made at the first save, readable by its owner only, and belongs to the tokenizer. `saves`
    says whether anything is learned that may be saved.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: Any, *, saves: bool) -> None:
        if tokenizer is None:
            raise ConfigError(
                "remember= must come with tokenizer=, the model's tokenizer, to which what is "
                "learned belongs (got None)"
            )
        self.path = Path(os.path.realpath(file_of(path)))
        self._tokenizer = tokenizer_info(tokenizer)
        self._saves = saves
        self._learned: Learned | None = None
        self._vocab_size = 0
        self._saved = CacheContents(tokenizer=self._tokenizer)  # What needs no saving again.
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
            self._saved = self._contents_of(learned)
            self._saved_at = time.monotonic()

    def drop(self) -> None:
        with self._lock:
            self._learned = None

    def save(self) -> None:
        """Adds to the file what was learned since; does nothing if that is nothing."""
        with self._lock:
            if (now := self._news()) is not None:
                self._write(now)

    def save_if_due(self) -> None:
        """The same once in some minutes, in a thread of its own.

        Costs a copy of the tables. Another save, here or in another process, is not waited for.
        """
        if time.monotonic() - self._saved_at < SAVE_SECONDS or not self._lock.acquire(False):
            return
        beside = None
        try:
            if (now := self._news()) is not None:
                beside = threading.Thread(target=self._save_beside, args=[now])
                beside.start()
        finally:
            if beside is None:
                self._lock.release()

    def _save_beside(self, now: CacheContents) -> None:
        try:
            self._write(now, max_wait=0.0)
        except _Busy as error:
            _log.info("what was learned is saved later: %s", error)
        except CacheError as error:
            self._warn(error)
        finally:
            self._lock.release()

    def end(self) -> None:
        """The last save, when the `SelfSpec` goes or the process ends."""
        with self._lock:
            if (now := self._news()) is not None:
                try:
                    self._write(now)
                except CacheError as error:
                    self._warn(error)

    def _warn(self, error: CacheError) -> None:
        if not self._warned:
            _log.warning("what was learned is not saved: %s", error)
        self._warned = True

    def _news(self) -> CacheContents | None:
        """A copy of what is learned, if it may be saved and anything of it is new."""
        self._saved_at = time.monotonic()
        if self._learned is None or not self._saves:
            return None
        now = self._contents_of(self._learned)
        has_new_rows = any(len(table["ids"]) for table in self._new_rows(now).values())
        has_new_answers = not _is_same(now.answers, self._saved.answers)
        is_new = has_new_rows or has_new_answers or now.calibration != self._saved.calibration
        return now if is_new else None

    def _new_rows(self, now: CacheContents) -> dict[str, Arrays]:
        old = self._saved.tables
        return {name: _changed(name, now.tables[name], old[name]) for name in now.tables}

    def _write(self, now: CacheContents, max_wait: float | None = None) -> None:
        """Puts what is new over the file; raises `_Busy` if another process keeps its lock."""
        from filelock import FileLock, Timeout

        start, wait = time.monotonic(), _MAX_WAIT if max_wait is None else max_wait
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=wait, mode=0o600):
                # What killed writers left, since all others wait for the lock.
                remove_scratch(self.path.parent, glob.escape(self.path.name))
                kept = self._kept() or CacheContents(tokenizer=self._tokenizer)
                about = {"kept_by": "remember"}
                new = replace(now, tables=self._new_rows(now), about=about)
                contents = put_over(kept, new, self._vocab_size)
                save_cache(self.path, contents, overwrite=True, mode=0o600)
        except OSError as error:
            kind = _Busy if isinstance(error, Timeout) else CacheError
            raise kind(
                f"remember must be a file that can be written (got {str(self.path)!r}: "
                f"{error.strerror or error})"
            ) from error
        self._saved = now
        seconds = time.monotonic() - start
        _log.info("saved what was learned to %s in %.2f s", self.path, seconds)

    def _kept(self) -> CacheContents | None:
        return read_cache(self.path, self._tokenizer) if os.path.exists(self.path) else None

    def _contents_of(self, learned: Learned) -> CacheContents:
        arrays = learned.tables()
        return CacheContents(
            tokenizer=self._tokenizer,
            tables={name: table for name, table in arrays.items() if name in KEY_OF},
            calibration=learned.calibration.rows(None),
            answers=answers_of(learned),
        )


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


def answers_of(learned: Learned) -> NDArray[np.int32] | None:
    """What rows have written, each text with -1 after it; None without a source that keeps it."""
    return learned.tables().get("texts", {}).get("tokens")


def _changed(source: str, now: Arrays, before: Arrays) -> Arrays:
    """The rows that are new or other than before. Keys are sorted in both."""
    if not len(before["ids"]):
        return now
    keys, old_keys = (_flat(table[KEY_OF[source]]) for table in (now, before))
    found = np.searchsorted(old_keys, keys).clip(max=len(old_keys) - 1)
    same = old_keys[found] == keys
    for name in ("ids", "probabilities"):
        same &= (before[name][found] == now[name]).all(axis=1)
    return {name: array[~same] for name, array in now.items()}


def put_over(kept: CacheContents, new: CacheContents, num_ids: int = 0) -> CacheContents:
    """Replays the new rows into tables made of what is kept, so that it never outgrows them.

    Of two rates, the one with more trials wins. The model has at least `num_ids` tokens.
    """
    # Models that share a tokenizer may pad their vocabularies differently.
    num_ids = max(num_ids, kept.count_ids(), new.count_ids())
    widths = [t["ids"].shape[1] for part in (kept, new) for t in part.tables.values()]
    top_k = max(widths, default=1)
    if num_ids * top_k > _MOST_ENTRIES:
        raise CacheError(
            f"tables have at most {_MOST_ENTRIES:,} entries (got {num_ids} tokens with {top_k} "
            "next ones each); leave that cache out"
        )
    both = Learned([REGISTRY[name](num_ids, top_k) for name in KEY_OF], Calibration(), top_k)
    trials = {_kinds(row): row[2] for row in kept.calibration or []}
    rates = [row for row in new.calibration or [] if row[2] >= trials.get(_kinds(row), 0)]
    restore(both, kept, num_ids)
    restore(both, replace(new, calibration=rates), num_ids)
    tables = {name: table for name, table in both.tables().items() if len(table["ids"])}
    return replace(
        new,
        tables=tables,
        calibration=both.calibration.rows() or None,
        answers=_joined(kept.answers, new.answers),
    )


def _flat(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Tokens (N,) or pairs (N, 2) as one number each, in the same order."""
    wide = keys.astype(np.int64)
    return wide if wide.ndim == 1 else (wide[:, 0] << 32) + wide[:, 1]


def _is_same(answers: Any, others: Any) -> bool:
    return answers is others or np.array_equal(answers, others)


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


def _kinds(row: list[Any]) -> tuple[Any, ...]:
    return tuple(map(tuple, row[0]))
