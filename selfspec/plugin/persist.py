"""Between what a `SelfSpec` holds in memory and what a cache folder keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from selfspec.config import SpecConfig
from selfspec.draft.memory import Memory
from selfspec.draft.sources import REGISTRY, LastingSource, Source
from selfspec.draft.sources.corpus import CorpusSource
from selfspec.errors import CacheFormatError, CacheTokenizerError, VocabularyError
from selfspec.store import (
    KEY_OF,
    CacheContents,
    TokenizerInfo,
    check_values,
    load_cache,
    push_cache,
    save_cache,
    tokenizer_info,
)

__all__ = ["Persistent", "new_source", "restore"]

P = TypeVar("P", bound="Persistent")


class Persistent:
    """The half of `SelfSpec` that goes to disk and to the Hub, and comes from there.

    A cache folder is tied to a tokenizer: every model that shares it can load the folder. What
    was loaded is kept beside what is learned, so `forget()` goes back to it.
    """

    _memory: Memory | None = None
    _loaded: CacheContents | None = None

    @classmethod
    def from_pretrained(
        cls: type[P],
        folder_or_hub_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        tokenizer: Any = None,
        config: SpecConfig | None = None,
        **knobs: Any,
    ) -> P:
        """A `SelfSpec` that starts with what a cache folder or a Hub repository holds.

        Args:
            folder_or_hub_id: Where `save_pretrained` or `selfspec cache build` wrote to.
            revision: Branch, tag or commit of the Hub repository.
            tokenizer: The model's; a cache of another one is refused. Without it, only a model
                that doesn't know the cache's ids is, at first use.
            config: All knobs at once; or name them one by one.
        """
        path = os.fspath(folder_or_hub_id)
        contents = load_cache(path, revision=revision, tokenizer=tokenizer)
        return cls.from_contents(contents, config=config, **knobs)

    @classmethod
    def from_contents(
        cls: type[P], contents: CacheContents, *, config: SpecConfig | None = None, **knobs: Any
    ) -> P:
        """The same from contents that were loaded before; any number may share them."""
        spec = cls(config, **knobs)  # type: ignore[call-arg]
        spec._loaded = contents
        return spec

    def contents(
        self, *, tokenizer: Any = None, about: Mapping[str, Any] | None = None
    ) -> CacheContents:
        """What `save_pretrained` would write: all that was learned, on top of what was loaded.

        What was loaded for a source that the knobs leave out is kept as it was.
        """
        loaded = self._loaded or CacheContents(tokenizer=_owner(None, tokenizer))
        tables, calibration = dict(loaded.tables), loaded.calibration
        if self._memory is not None:
            learned = self._memory.tables()
            tables |= {name: arrays for name, arrays in learned.items() if name in KEY_OF}
            calibration = self._memory.calibration.rows()
        return CacheContents(
            tokenizer=_owner(loaded.tokenizer, tokenizer),
            tables=tables,
            corpus=loaded.corpus,
            calibration=calibration,
            about=loaded.about if about is None else about,
        )

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        overwrite: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes all that was learned to a cache folder, whole or not at all.

        Args:
            folder: Must not exist, or be empty.
            tokenizer: The model's, to which the folder is tied. Not needed after
                `from_pretrained`, which knows it.
            overwrite: Replace a cache folder that is there; nothing else is ever replaced.
            about: What to say of it on its card: corpus, licence, whatever JSON can say.
        """
        save_cache(folder, self.contents(tokenizer=tokenizer, about=about), overwrite=overwrite)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: Any = None,
        private: bool | None = None,
        revision: str | None = None,
        about: Mapping[str, Any] | None = None,
        token: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Uploads the same to a model repository, made where needed; returns its URL."""
        return push_cache(
            repo_id,
            self.contents(tokenizer=tokenizer, about=about),
            private=private,
            revision=revision,
            token=token,
            commit_message=commit_message,
        )


def new_source(
    name: str, loaded: CacheContents | None, vocab_size: int, top_k: int
) -> Source | None:
    """A source by its name; None for a corpus where none was loaded."""
    if name != "corpus":
        return REGISTRY[name](vocab_size, top_k)
    if loaded is None or loaded.corpus is None:
        return None
    return CorpusSource(loaded.corpus, vocab_size, top_k)


def restore(memory: Memory, loaded: CacheContents | None, vocab_size: int) -> None:
    """Puts what was loaded into fresh memory; every id is checked against the vocabulary."""
    if loaded is None:
        return
    _check_vocabulary(loaded, vocab_size)
    for source in memory.sources:
        if isinstance(source, LastingSource) and source.name in loaded.tables:
            arrays = loaded.tables[source.name]
            try:
                check_values(source.name, arrays, vocab_size)
            except ValueError as error:
                raise CacheFormatError(f"the loaded cache is damaged: {error}") from error
            source.restore(arrays)
    memory.calibration.restore(loaded.calibration or [])


def _check_vocabulary(loaded: CacheContents, vocab_size: int) -> None:
    """Refuses a model that doesn't know all ids of a cache; one that knows more may be padded."""
    num_ids = loaded.count_ids() if loaded.num_ids is None else loaded.num_ids
    if vocab_size < num_ids:
        raise VocabularyError(
            f"the loaded cache holds token ids up to {num_ids - 1} and the model has a vocabulary "
            f"of {vocab_size} tokens; load a cache that was built for this model's tokenizer"
        )


def _owner(known: TokenizerInfo | None, tokenizer: Any) -> TokenizerInfo:
    """Whose ids are saved: the loaded cache's tokenizer, or the one that is given."""
    given = None if tokenizer is None else tokenizer_info(tokenizer)
    if known is None and given is None:
        raise CacheTokenizerError(
            "a cache folder is tied to a tokenizer, and this SelfSpec has loaded none (got "
            "tokenizer=None); pass tokenizer="
        )
    if known and given and given.fingerprint != known.fingerprint:
        raise CacheTokenizerError(
            f"this SelfSpec has loaded a cache of tokenizer {known} and can't be saved for another "
            f"(got {given}); leave tokenizer= out"
        )
    return known or given  # type: ignore[return-value]
