"""From a command's options to a model that is ready to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from selfspec.cli.shared.messages import working
from selfspec.cli.shared.options import DraftOptions, Knobs, WriteOptions
from selfspec.config import SpecConfig
from selfspec.machine.memory import amount_in_bytes

if TYPE_CHECKING:
    from selfspec.cli.shared.model_loading import Loaded
    from selfspec.cli.shared.writer import Start, Writer

# Under --max-memory each of many texts has room for this number of tokens, if layers have to be
# streamed. Two more have room beside them: one that is being read, and one for dividing rows anew.
TOKENS_A_TEXT = 512
OTHER_TEXTS = 2


def checked(asked: DraftOptions, knobs: Knobs, option: str = "--model") -> SpecConfig:
    """The knobs. Every option is checked that can be checked before torch is imported."""
    from selfspec.cli.shared.model_loading import check_options, source_of

    check_options(asked, option)
    if asked.draft_model is not None:
        source_of(asked.draft_model, "--draft-model")
    return knobs.config()


@contextmanager
def loaded(
    asked: WriteOptions, max_new_tokens: int, *, chats: bool = False, num_texts: int = 0
) -> Iterator[Writer]:
    """The model, loaded and ready to write; transformers' own messages are off meanwhile."""
    with working(f"Loading {asked.title}"):
        from selfspec.cli.shared.model_loading import quiet
        from selfspec.cli.shared.writer import Writer

        model, start = opened(asked, chats=chats, num_texts=num_texts)
        writer = Writer(model, asked, max_new_tokens, start)
    with quiet():
        yield writer


def opened(asked: DraftOptions, *, chats: bool = False, num_texts: int = 0) -> tuple[Loaded, Start]:
    """The model, and what drafts start with.

    Under `--max-memory` room is set aside for `num_texts` texts, or for a long one. Tokenizer and
    caches are quick to read, so their faults are told before the model is read.
    """
    from selfspec.cache import Remembered, load_cache
    from selfspec.cli.shared.model_loading import (
        check_template,
        load_draft_model,
        load_model,
        load_tokenizer,
    )
    from selfspec.cli.shared.writer import Start

    tokenizer = load_tokenizer(asked)
    if chats:
        check_template(asked.model, tokenizer.chat_template)
    held = None if asked.cache is None else load_cache(asked.cache, tokenizer=tokenizer)
    if asked.remember is not None:
        Remembered(asked.remember, tokenizer, saves=False)  # Refuses a file of another tokenizer.
    small = load_draft_model(asked.draft_model, asked)
    room = (TOKENS_A_TEXT, num_texts + OTHER_TEXTS) if num_texts else (2048, 1)
    return load_model(asked, tokenizer, *room, small), Start(held, asked.remember, small)


def memory_of_texts(
    model: Any, draft_model: Any, max_memory: str | None, num_texts: int
) -> int | None:
    """What the keys and values of all texts may take: what the models leave of `--max-memory`."""
    if max_memory is None:
        return None
    from selfspec.run.rows_backend import kv_bytes_per_token

    num_tokens = TOKENS_A_TEXT * (num_texts + OTHER_TEXTS)
    weights, set_aside = _weight_bytes(model), num_tokens * kv_bytes_per_token(model)
    left = amount_in_bytes(max_memory, weights + set_aside) - weights
    if draft_model is not None:  # It keeps the texts' keys and values, too.
        left -= _weight_bytes(draft_model) + num_tokens * kv_bytes_per_token(draft_model)
    return max(left, set_aside)


def _weight_bytes(model: Any) -> int:
    num_bytes: int = sum(each.numel() * each.element_size() for each in model.parameters())
    return num_bytes
