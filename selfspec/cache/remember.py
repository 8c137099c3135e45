"""The file of `remember=`: what it keeps, and how what is new is put over that under a lock."""

from __future__ import annotations

import glob
import logging
import os
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
from selfspec.draft.memory import DraftMemory
from selfspec.draft.sources import REGISTRY
from selfspec.draft.sources.answers import MAX_TOKENS
from selfspec.errors import CacheError, ConfigError, VocabularyError
from selfspec.machine.user_files import locked, remove_scratch

# Models pad their vocabularies by fewer tokens. Users add some tokens that their model lacks.
_MOST_PADDING, _MORE_TOKENS = 4096, 64
_MOST_ENTRIES = 1 << 28  # More than any vocabulary needs; a file may name any token.

_log = logging.getLogger("selfspec")


class Busy(CacheError):
    """Another process has the lock of the file."""


class RememberedFile:
    """A file that belongs to one tokenizer, made at the first save, for its owner alone to read.

    Refuses what can't be read, and with `saves` also what can't be written.
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
        if not self.path.parent.is_dir():
            raise CacheError(
                f"remember must be a file in a folder that exists (got {str(self.path)!r}); make "
                "the folder, or name another file"
            )
        self.tokenizer = tokenizer_info(tokenizer)
        self.saves = saves
        self.read()
        if saves:
            check_target(self.path, overwrite=True)

    def read(self) -> CacheContents | None:
        """What the file keeps; None if it is not there yet."""
        return read_cache(self.path, self.tokenizer) if os.path.exists(self.path) else None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses a model of so many tokens if the tokenizer can't be its own."""
        if not -_MORE_TOKENS <= vocab_size - self.tokenizer.vocab_size <= _MOST_PADDING:
            raise VocabularyError(
                "remember= must come with the model's own tokenizer (got "
                f"{self.tokenizer} of {self.tokenizer.vocab_size} tokens, and the model has "
                f"{vocab_size}); load the tokenizer by the model's name"
            )

    def add(self, contents: CacheContents, num_ids: int, *, max_wait: float) -> None:
        """Puts contents over those of the file, for a model with `num_ids` tokens.

        Raises `Busy` if another process has the lock for longer than `max_wait` seconds.
        """
        start = time.monotonic()
        try:
            with locked(Path(f"{self.path}.lock"), max_wait=max_wait, mode=0o600):
                # What killed writers left, since all others wait for the lock.
                remove_scratch(self.path.parent, glob.escape(self.path.name))
                kept = self.read() or CacheContents(tokenizer=self.tokenizer)
                both = put_over(kept, contents, num_ids)
                save_cache(self.path, both, overwrite=True, mode=0o600)
        except OSError as error:
            error_class = Busy if isinstance(error, TimeoutError) else CacheError
            raise error_class(
                f"remember must be a file that can be written (got {str(self.path)!r}: "
                f"{error.strerror or error})"
            ) from error
        seconds = time.monotonic() - start
        _log.info("saved what was learned to %s in %.2f s", self.path, seconds)


def restore(learned: DraftMemory, contents: CacheContents, vocab_size: int) -> None:
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
        elif source.name == "answers" and contents.answers is not None:
            source.restore({"tokens": contents.answers})
    learned.calibration.restore(contents.calibration or [])


def contents_of(learned: DraftMemory, tokenizer: TokenizerInfo) -> CacheContents:
    """A copy of what is learned. It has no answers if no source keeps them."""
    arrays = learned.tables()
    return CacheContents(
        tokenizer=tokenizer,
        tables={name: table for name, table in arrays.items() if name in KEY_OF},
        calibration=learned.calibration.rows(),
        answers=arrays.get("answers", {}).get("tokens"),
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
            "next ones per row); leave that cache out"
        )
    both = DraftMemory([REGISTRY[name](num_ids, top_k) for name in KEY_OF], Calibration(), top_k)
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
    """The answers of all without repetition, the newest last; too old ones are dropped.

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
