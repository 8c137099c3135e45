"""The `DraftMemory` of one `SelfSpec`: what was loaded and remembered, and what it learns then.

Four nouns: `DraftMemory` has the sources and rates that drafts are made from right now. This class
makes it when it is first needed, and saves it. `CacheContents` is the same as a cache has it, as
arrays, and a `RememberedFile` is the file of `remember=`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from selfspec.cache.contents import (
    CacheContents,
    Tokenizer,
    TokenizerInfo,
    tokenizer_info,
)
from selfspec.cache.remember import Busy, RememberedFile, contents_of, restore
from selfspec.config import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.memory import DraftMemory
from selfspec.draft.shape import Shape
from selfspec.draft.sources import REGISTRY, Source
from selfspec.errors import CacheError, SelfSpecError, VocabularyError, one_line

SAVE_SECONDS = 300.0
# Seconds. `save_learned()` and the last save wait for another process, which takes less than one.
_MAX_WAIT = 10.0

_log = logging.getLogger("selfspec")


class DraftMemoryLoader:
    """Makes what is learned at the first call, and again after `forget`. Safe for several threads.

    What was loaded is kept apart from what is learned. Extra sources and a calibration are copied,
    so that what they learn is forgotten with it.
    """

    def __init__(
        self,
        config: SpecConfig,
        *,
        loaded: CacheContents | None = None,
        remembered: RememberedFile | None = None,
        extra_sources: Sequence[Source] = (),
        calibration: Calibration | None = None,
        shape: Shape | None = None,
    ) -> None:
        self.loaded, self.remembered = loaded, remembered
        self._config = config
        self._extra_sources = tuple(extra_sources)
        self._calibration = Calibration() if calibration is None else calibration
        self._shape = Shape() if shape is None else shape
        self._learned: DraftMemory | None = None
        self._vocab_size = 0
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._saved_at = 0.0
        self._warned = False

    def of(self, vocab_size: int) -> DraftMemory:
        """The memory for this vocabulary; an error if it belongs to one of another size."""
        with self._lock:
            if self._learned is None:
                if self.remembered is not None:
                    self.remembered.check_vocabulary(vocab_size)
                self._learned, self._vocab_size = self._opened(vocab_size), vocab_size
                self._saved_at = time.monotonic()
            if vocab_size != self._vocab_size:
                raise VocabularyError(
                    f"this SelfSpec has learned on a vocabulary of {self._vocab_size} tokens and "
                    f"the model has {vocab_size}; use one SelfSpec per tokenizer, or forget()"
                )
            return self._learned

    def or_nothing(self, disable: Callable[[str], object], vocab_size: int) -> DraftMemory:
        """The same for a default assistant, whose caller knows nothing of selfspec.

        If it belongs to another vocabulary, or its file is damaged, the call goes on without it,
        and `disable` gets the reason.
        """
        try:
            return self.of(vocab_size)
        except SelfSpecError as error:
            reason = one_line(error).partition(";")[0]
            disable(f"its default assistant has failed ({reason})")
            return DraftMemory([], Calibration(), top_k=1)

    def forget(self) -> None:
        with self._lock:
            self._learned = None

    def save(self) -> None:
        """Adds what is learned to the file of `remember=`."""
        self._save(_MAX_WAIT)

    def save_if_due(self) -> None:
        """The same once in some minutes, unless another process saves at the moment."""
        if self.remembered is not None and time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self._save_or_warn(max_wait=0.0)

    def end(self) -> None:
        """The last save, when the `SelfSpec` goes or the process ends."""
        self._save_or_warn(_MAX_WAIT)

    def _save_or_warn(self, max_wait: float) -> None:
        try:
            self._save(max_wait)
        except CacheError as error:
            if isinstance(error, Busy) and not max_wait:
                _log.info("what was learned is saved later: %s", error)
            elif not self._warned:
                _log.warning("what was learned is not saved: %s", error)
                self._warned = True

    def _save(self, max_wait: float) -> None:
        self._saved_at = time.monotonic()
        learned, remembered = self._learned, self.remembered
        if learned is None or remembered is None or not remembered.saves:
            return
        with self._saving:
            contents = contents_of(learned, remembered.tokenizer)
            contents = replace(contents, about={"kept_by": "remember"})
            remembered.add(contents, self._vocab_size, max_wait=max_wait)

    def contents(
        self, tokenizer: Tokenizer | None, about: Mapping[str, Any] | None
    ) -> CacheContents:
        """Everything that was loaded or learned, for a cache.

        Tables that were loaded for a source that the knobs leave out are included unchanged.
        """
        owner = self._owner(tokenizer)
        loaded = self.loaded or CacheContents(tokenizer=owner)
        about = loaded.about if about is None else about
        learned = self._learned  # Another thread may forget it meanwhile.
        if learned is None:
            return replace(loaded, about=about)
        current = contents_of(learned, owner)
        answers = loaded.answers if current.answers is None else current.answers
        tables = {**loaded.tables, **current.tables}
        return replace(current, tables=tables, answers=answers, about=about)

    def _owner(self, tokenizer: Tokenizer | None) -> TokenizerInfo:
        """The tokenizer of what was loaded or is remembered, or else the one that is named."""
        known = self.loaded or self.remembered
        if known is None:
            if tokenizer is None:
                raise CacheError(
                    "a cache belongs to a tokenizer, and this SelfSpec knows none (got "
                    "tokenizer=None); pass tokenizer="
                )
            return tokenizer_info(tokenizer)
        named = known.tokenizer if tokenizer is None else tokenizer_info(tokenizer)
        if named.fingerprint != known.tokenizer.fingerprint:
            raise CacheError(
                f"this SelfSpec belongs to tokenizer {known.tokenizer} and can't be saved for "
                f"another (got {named}); leave tokenizer= out"
            )
        return known.tokenizer

    def _opened(self, vocab_size: int) -> DraftMemory:
        """What was loaded, and what is remembered on top of it.

        Heads belong to one text.
        """
        top_k, loaded = min(self._config.top_k, vocab_size), self.loaded
        known = [REGISTRY[name] for name in self._config.sources if name in REGISTRY]
        sources = [make(vocab_size, top_k) for make in known]
        sources += [source.copy() for source in self._extra_sources]
        learned = DraftMemory(sources, self._calibration.copy(), top_k, shape=self._shape)
        if loaded is not None:
            restore(learned, loaded, vocab_size)
        if self.remembered is not None and (kept := self.remembered.read()) is not None:
            # A model with the same tokenizer may have more ids than this one; the file keeps them.
            restore(learned, kept.below(vocab_size), vocab_size)
            _log.info("remembered what %s keeps", self.remembered.path)
        return learned
