"""The `Learned` of one `SelfSpec`: made of what was loaded and remembered, and what it learns then.

Four nouns: `Learned` has the sources and rates that drafts are made from right now. This class
makes it when it is first needed. `CacheContents` is the same as a cache has it, as arrays, and a
`RememberedFile` is the file of `remember=`, which is read into `Learned` and saved from it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from selfspec.cache.contents import (
    CacheContents,
    Tokenizer,
    TokenizerInfo,
    tokenizer_info,
)
from selfspec.cache.remember import RememberedFile, contents_of, restore
from selfspec.config import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.learned import Learned
from selfspec.draft.shape import Shape
from selfspec.draft.sources import REGISTRY, Source
from selfspec.errors import CacheError, ConfigError, VocabularyError


class LearnedOnDemand:
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
        _check_sources(extra_sources)
        self.loaded, self.remembered = loaded, remembered
        self._config = config
        self._extra_sources = tuple(extra_sources)
        self._calibration = Calibration() if calibration is None else calibration
        self._shape = Shape() if shape is None else shape
        self._learned: Learned | None = None
        self._vocab_size = 0
        self._lock = threading.Lock()

    def of(self, vocab_size: int) -> Learned:
        """What is learned; an error if it belongs to a vocabulary of another size."""
        with self._lock:
            if self._learned is None:
                self._learned, self._vocab_size = self._opened(vocab_size), vocab_size
            if vocab_size != self._vocab_size:
                raise VocabularyError(
                    f"this SelfSpec has learned on a vocabulary of {self._vocab_size} tokens and "
                    f"the model has {vocab_size}; use one SelfSpec for each tokenizer, or forget()"
                )
            return self._learned

    def forget(self) -> None:
        with self._lock:
            if self.remembered is not None:
                self.remembered.drop()
            self._learned = None

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
        files = (self.loaded, self.remembered)
        known = next((file.tokenizer for file in files if file is not None), None)
        if tokenizer is None:
            if known is None:
                raise CacheError(
                    "a cache belongs to a tokenizer, and this SelfSpec knows none (got "
                    "tokenizer=None); pass tokenizer="
                )
            return known
        named = tokenizer_info(tokenizer)
        if known is not None and named.fingerprint != known.fingerprint:
            raise CacheError(
                f"this SelfSpec belongs to tokenizer {known} and can't be saved for another (got "
                f"{named}); leave tokenizer= out"
            )
        return known or named

    def _opened(self, vocab_size: int) -> Learned:
        """What was loaded, and what is remembered on top of it.

        A map and heads belong to one text.
        """
        top_k, loaded = min(self._config.top_k, vocab_size), self.loaded
        known = [REGISTRY[name] for name in self._config.sources if name in REGISTRY]
        sources = [make(vocab_size, top_k) for make in known]
        sources += [source.copy() for source in self._extra_sources]
        learned = Learned(
            sources,
            self._calibration.copy(),
            top_k,
            shape=self._shape,
            strict=self._config.strict,
        )
        if loaded is not None:
            restore(learned, loaded, vocab_size)
        if self.remembered is not None:
            self.remembered.open(learned, vocab_size)
        return learned


def _check_sources(sources: Sequence[Source]) -> None:
    if not isinstance(sources, Sequence):
        raise ConfigError(f"extra_sources must be a list of Sources (got {sources!r:.80})")
    for source in sources:
        if not isinstance(source, Source):
            raise ConfigError(
                f"extra_sources must be Sources (got {source!r:.80}); inherit from "
                "selfspec.draft.sources.Source"
            )
