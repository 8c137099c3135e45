"""What a `SelfSpec` keeps from process to process: opened once, saved now and then and at the end.

There is no thread: saving happens after a call, when the last one was some minutes ago. A save that
fails is warned of and never ends a call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from selfspec.draft.memory import Memory
from selfspec.errors import CacheError
from selfspec.store import (
    KEY_OF,
    CacheContents,
    MemoryFolder,
    TokenizerInfo,
    is_unnamed,
    news,
    on_top,
    tokenizer_info,
    unnamed_tokenizer,
)

SAVE_SECONDS = 300.0

_log = logging.getLogger("selfspec")


class Remembered:
    """The folder behind one `SelfSpec`, and what of its memory is in there already.

    Args:
        folder: Where to keep it. Made at the first save, readable by its owner only.
        tokenizer: The model's tokenizer. Without it, the folder is tied to a vocabulary's size.
        saves: Whether anything is learned that may be saved.
    """

    def __init__(self, folder: str | os.PathLike[str], tokenizer: Any, *, saves: bool) -> None:
        self._folder = MemoryFolder(folder)
        self._tokenizer = None if tokenizer is None else tokenizer_info(tokenizer)
        self._saves = saves
        self._memory: Memory | None = None
        self._vocab_size = 0
        self._before: CacheContents | None = None  # The memory as it was when last saved or read.
        self._saved_at = 0.0
        self._warned = False
        self._lock = threading.Lock()
        if saves:
            self._folder.check_writable()
        if self._tokenizer is not None:
            self._folder.check_tokenizer(self._tokenizer)

    def read(self, vocab_size: int) -> CacheContents | None:
        """What is kept, to go on top of fresh memory."""
        kept = self._folder.read()
        if kept is not None:
            self._check_owner(kept, vocab_size)
            _log.info("remembered what %s keeps", self._folder.path)
        return kept

    def follow(self, memory: Memory, vocab_size: int) -> None:
        """Keeps from now on what this memory learns."""
        with self._lock:
            self._memory, self._vocab_size = memory, vocab_size
            self._before = self._now(memory)
            self._saved_at = time.monotonic()

    def drop(self) -> None:
        """Lets go of the memory, without what it learned since the last save."""
        with self._lock:
            self._memory = None

    def save(self) -> None:
        """Adds to the folder what was learned since; does nothing if that is nothing."""
        with self._lock:
            self._save()

    def save_if_due(self) -> None:
        """The same once in some minutes; another thread that saves already is not waited for."""
        if time.monotonic() - self._saved_at < SAVE_SECONDS or not self._lock.acquire(False):
            return
        try:
            self._try_to_save()
        finally:
            self._lock.release()

    def end(self) -> None:
        """The last save, when the `SelfSpec` goes or the process ends."""
        with self._lock:
            self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self._save()
        except (CacheError, OSError) as error:
            if not self._warned:
                _log.warning("what was learned is not saved: %s", error)
            self._warned = True

    def _save(self) -> None:
        self._saved_at = start = time.monotonic()
        if self._memory is None or self._before is None or not self._saves:
            return
        now, before, vocab_size = self._now(self._memory), self._before, self._vocab_size
        learned = news(now, before)
        if learned is None:
            return

        def change(kept: CacheContents | None) -> CacheContents:
            if kept is not None:
                self._check_owner(kept, vocab_size)
            # Models that share a tokenizer may pad their vocabularies differently.
            num_ids = max(vocab_size, kept.count_ids() if kept else 0)
            tables, rates = on_top(learned, before, kept, num_ids)
            return CacheContents(
                tokenizer=self._owner(kept),
                tables=tables,
                calibration=rates,
                about={"kept_by": "remember", "vocab_size": vocab_size},
            )

        self._folder.update(change)
        self._before = now
        seconds = time.monotonic() - start
        _log.info("saved what was learned to %s in %.2f s", self._folder.path, seconds)

    def _now(self, memory: Memory) -> CacheContents:
        tables = {name: part for name, part in memory.tables().items() if name in KEY_OF}
        rates = memory.calibration.rows(None)
        return CacheContents(tokenizer=self._owner(None), tables=tables, calibration=rates)

    def _owner(self, kept: CacheContents | None) -> TokenizerInfo:
        """The tokenizer that the folder belongs to, as exactly as it is known by now."""
        if kept is not None and not is_unnamed(kept.tokenizer):
            return kept.tokenizer
        return self._tokenizer or unnamed_tokenizer(self._vocab_size)

    def _check_owner(self, kept: CacheContents, vocab_size: int) -> None:
        """Refuses another tokenizer; if one of the two is unknown, a vocabulary of another size."""
        owner, wanted = kept.tokenizer, self._tokenizer
        if wanted is not None and not is_unnamed(owner):
            same = owner.fingerprint == wanted.fingerprint
        else:
            same = kept.about.get("vocab_size") == vocab_size
        if not same:
            raise self._folder.wrong_owner(owner, wanted or unnamed_tokenizer(vocab_size))
