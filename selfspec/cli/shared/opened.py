"""From a command's options to a model that is ready to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from selfspec.cli.shared.messages import working
from selfspec.cli.shared.options import DraftOptions, Knobs, ModelOptions, RunOptions, Sampling
from selfspec.config import SpecConfig

if TYPE_CHECKING:
    from selfspec.cli.shared.writer import Writer
    from selfspec.store import CacheContents


def checked(
    loading: ModelOptions, knobs: Knobs, drafts: DraftOptions, option: str = "--model"
) -> SpecConfig:
    """The knobs. Every option is checked that can be checked before torch is imported."""
    from selfspec.cli.shared.model_loading import check_options, source_of

    check_options(loading, option)
    if drafts.draft_model is not None:
        source_of(drafts.draft_model, "--draft-model")
    return knobs.config()


@contextmanager
def loaded(
    loading: RunOptions,
    sampling: Sampling,
    max_new_tokens: int,
    drafts: DraftOptions,
    *,
    chats: bool = False,
    max_length: int = 2048,
    max_texts: int = 1,
) -> Iterator[Writer]:
    """The model, loaded and ready to write; transformers' own messages are off meanwhile.

    Under `--max-memory` room for `max_texts` texts of `max_length` tokens is set aside.
    """
    with working(f"Loading {loading.model or 'the embedded model'}"):
        from selfspec.cli.shared.model_loading import load_draft_model, load_model, quiet
        from selfspec.cli.shared.writer import Start, Writer

        tokenizer, held = checked_tokenizer(loading, drafts, chats=chats)
        small = load_draft_model(drafts.draft_model, loading)
        model = load_model(loading, tokenizer, max_length, max_texts, small)
        start = Start(held, drafts.remember, small)
        writer = Writer(model, sampling, max_new_tokens, start)
    with quiet():
        yield writer


def checked_tokenizer(
    loading: ModelOptions, drafts: DraftOptions, *, chats: bool = False
) -> tuple[Any, CacheContents | None]:
    """The tokenizer, and what the cache holds, both of which are read before the model.

    They are quick to read, so their faults are told first, also that they don't fit each other.
    """
    from selfspec.cli.shared.model_loading import check_template, load_tokenizer
    from selfspec.store import MemoryFolder, check_tokenizer, load_cache, tokenizer_info

    held = None if drafts.cache is None else load_cache(drafts.cache)
    kept = None if drafts.remember is None else MemoryFolder(drafts.remember)
    tokenizer = load_tokenizer(loading)
    if chats:
        check_template(loading.model, tokenizer.chat_template)
    if held is not None:
        check_tokenizer("--cache", held.tokenizer, tokenizer_info(tokenizer))
    if kept is not None:
        kept.check_tokenizer(tokenizer_info(tokenizer))
    return tokenizer, held
