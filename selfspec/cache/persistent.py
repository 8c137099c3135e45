"""Saves what a `SelfSpec` holds in memory to a cache, and loads it from one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from selfspec.cache.contents import KEY_OF, CacheContents, TokenizerInfo, tokenizer_info
from selfspec.cache.file import save_cache
from selfspec.cache.hub import load_cache, push_cache
from selfspec.cache.remember import Remembered, restore
from selfspec.config import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.memory import Memory
from selfspec.draft.sources import REGISTRY, Source
from selfspec.draft.sources.corpus import CorpusSource
from selfspec.errors import CacheError, ConfigError

P = TypeVar("P", bound="Persistent")


class Persistent:
    """The methods of `SelfSpec` that load and save caches, on disk and on the Hub.

    A cache belongs to a tokenizer, and every model with this tokenizer can load it. What was loaded
    is kept apart from what is learned, so that `forget()` can return to it.
    """

    _memory: Memory | None = None
    _loaded: CacheContents | None = None
    _remembered: Remembered | None = None

    @classmethod
    def from_pretrained(
        cls: type[P],
        path_or_hub_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        tokenizer: Any = None,
        remember: str | os.PathLike[str] | None = None,
        config: SpecConfig | None = None,
        **knobs: Any,
    ) -> P:
        """A `SelfSpec` that starts with what a cache holds.

        Args:
            path_or_hub_id: A file that `save_pretrained` or `selfspec cache build` wrote, with or
                without its ending ``.safetensors``, or a repository on the Hub.
            revision: Branch, tag or commit of the Hub repository.
            tokenizer: The model's tokenizer; a cache of another one is refused. Without it, a
                model is refused at its first call if its vocabulary lacks ids of the cache.
            remember: A file to keep in what is learned beyond the cache, as of `SelfSpec`. What it
                holds goes on top of the cache.
            config: All knobs at once.
            knobs: Single knobs, instead of `config`; and `draft_model`, as of `SelfSpec`.
        """
        contents = load_cache(path_or_hub_id, revision=revision, tokenizer=tokenizer)
        return cls.from_contents(contents, remember=remember, config=config, **knobs)

    @classmethod
    def from_contents(
        cls: type[P],
        contents: CacheContents,
        *,
        remember: str | os.PathLike[str] | None = None,
        config: SpecConfig | None = None,
        **knobs: Any,
    ) -> P:
        """A `SelfSpec` that starts with loaded contents, which several may share."""
        owner = contents.tokenizer
        spec = cls(config, remember=remember, tokenizer=owner, **knobs)  # type: ignore[call-arg]
        spec._loaded = contents
        return spec

    def contents(
        self, *, tokenizer: Any = None, about: Mapping[str, Any] | None = None
    ) -> CacheContents:
        """What `save_pretrained` would write: everything that was loaded or learned.

        Tables that were loaded for a source that the knobs leave out are included unchanged.
        """
        owner = _owner(None if self._loaded is None else self._loaded.tokenizer, tokenizer)
        loaded = self._loaded or CacheContents(tokenizer=owner)
        tables, calibration = dict(loaded.tables), loaded.calibration
        if self._memory is not None:
            learned = self._memory.tables()
            tables |= {name: arrays for name, arrays in learned.items() if name in KEY_OF}
            calibration = self._memory.calibration.rows()
        return CacheContents(
            tokenizer=owner,
            tables=tables,
            corpus=loaded.corpus,
            calibration=calibration,
            about=loaded.about if about is None else about,
        )

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        overwrite: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes everything that was loaded or learned to a cache, whole or not at all.

        Args:
            path: A new file; ``.safetensors`` is added where it is missing.
            tokenizer: The model's tokenizer, to which the cache will belong. Not needed after
                `from_pretrained`, which knows it.
            overwrite: Whether to replace an existing cache. Other files are never replaced.
            about: Facts for the cache's card, such as corpus and licence, as JSON values.
        """
        save_cache(path, self.contents(tokenizer=tokenizer, about=about), overwrite=overwrite)

    def save_memory(self) -> None:
        """Saves what was learned to the file of `remember` now; what others saved there stays.

        Nothing is written if nothing was learned since the last save. Raises `CacheError` if the
        file can't be written or belongs to another tokenizer by now.
        """
        if self._remembered is None:
            raise ConfigError(
                "save_memory() needs a file (got remember=None); make the SelfSpec with "
                "remember=FILE, or call save_pretrained()"
            )
        self._remembered.save()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: Any = None,
        about: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Uploads the cache to a model repository, which is made if needed; returns its URL.

        The options are `private`, `revision`, `token` and `commit_message`, as of the Hub's client.
        """
        return push_cache(repo_id, self.contents(tokenizer=tokenizer, about=about), **options)


def new_memory(
    config: SpecConfig,
    loaded: CacheContents | None,
    remembered: Remembered | None,
    extra_sources: Sequence[Source],
    vocab_size: int,
    calibration: Calibration | None = None,
) -> Memory:
    """Memory with what was loaded, and what is remembered on top of it.

    There is no corpus among its sources if none was loaded. Extra sources and a calibration are
    copied, so that what they learn is forgotten with it.
    """
    top_k = min(config.top_k, vocab_size)
    sources: list[Source] = []
    for name in config.sources:
        if name != "corpus":
            sources.append(REGISTRY[name](vocab_size, top_k))
        elif loaded is not None and loaded.corpus is not None:
            sources.append(CorpusSource(loaded.corpus, vocab_size, top_k))
    sources += [source.copy() for source in extra_sources]
    calibration = Calibration() if calibration is None else calibration.copy()
    memory = Memory(sources, calibration, top_k)
    if loaded is not None:
        restore(memory, loaded, vocab_size)
    if remembered is not None:
        remembered.open(memory, vocab_size)
    return memory


def _owner(known: TokenizerInfo | None, tokenizer: Any) -> TokenizerInfo:
    """The tokenizer to save for: the loaded cache's, or the one that is given."""
    given = None if tokenizer is None else tokenizer_info(tokenizer)
    if known is None and given is None:
        raise CacheError(
            "a cache belongs to a tokenizer, and this SelfSpec has loaded none (got "
            "tokenizer=None); pass tokenizer="
        )
    if known and given and given.fingerprint != known.fingerprint:
        raise CacheError(
            f"this SelfSpec has loaded a cache of tokenizer {known} and can't be saved for another "
            f"(got {given}); leave tokenizer= out"
        )
    return known or given  # type: ignore[return-value]


def check_sources(sources: Sequence[Source]) -> None:
    """Refuses what is no source, before the first call would fail on it."""
    if not isinstance(sources, Sequence):
        raise ConfigError(f"extra_sources must be a list of Sources (got {sources!r:.80})")
    for source in sources:
        if not isinstance(source, Source):
            raise ConfigError(
                f"extra_sources must be Sources (got {source!r:.80}); inherit from "
                "selfspec.draft.sources.Source"
            )
        for name in ("open", "observe_pairs", "copy"):
            if not callable(getattr(source, name, None)):
                raise ConfigError(
                    f"extra_sources must have the methods of a Source (got {source!r:.80} without "
                    f"{name}(); before version 0.2, observe_pairs was named observe_places)"
                )
