"""Builds a cache: whole texts, and the tables that a model has filled while it read them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from selfspec.building.reading import begin_of_chat, teach
from selfspec.building.texts import VOCABULARY, read_ids
from selfspec.cache import CacheContents, tokenizer_info
from selfspec.cache.contents import Arrays
from selfspec.cache.learned_on_demand import LearnedOnDemand
from selfspec.config import SpecConfig
from selfspec.draft.sources.texts import MAX_TOKENS
from selfspec.errors import BuildError
from selfspec.forward.model import vocab_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def build_cache(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel] | None,
    *,
    has_texts: bool = True,
    num_tokens: int = 1_000_000,
    say: Callable[[str], object] = lambda _: None,
) -> CacheContents:
    """What a cache of the documents in `data` holds.

    The model that `load_model` gives fills tables with what it predicts after each of the first
    `num_tokens` tokens; None: there are no tables. `say` hears how far the model has read.
    """
    owner = tokenizer_info(tokenizer)
    # The card has no times, paths or machines: the same texts give the same file.
    about: dict[str, Any] = {"data": Path(data).expanduser().resolve().name}
    tables: dict[str, Arrays] = {}
    answers = None
    if load_model is not None:
        tables, about["tokens_read"] = _tables(data, tokenizer, load_model, num_tokens, say)
        about["model"] = owner.name
    if has_texts:
        texts, about["left_out"] = _texts(data, tokenizer)
        about["documents"], about["tokens"] = len(texts), sum(map(len, texts)) - len(texts)
        answers = np.concatenate(texts)[:MAX_TOKENS].astype(np.int32)
        answers[-1] = -1  # The last one may have been cut.
    return CacheContents(tokenizer=owner, tables=tables, answers=answers, about=about)


def _tables(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
    most_tokens: int,
    say: Callable[[str], object],
) -> tuple[dict[str, Arrays], int]:
    """The LUTs that the model has filled, and how many tokens it has read for them."""
    documents = (ids for ids in read_ids(data, tokenizer) if ids is not None)
    first = list(islice(documents, 1))
    if not first:  # Before the model is loaded.
        raise _nothing(data)
    model = load_model().eval()
    learned = LearnedOnDemand(SpecConfig()).of(vocab_size(model))
    prefix = begin_of_chat(tokenizer) if data == VOCABULARY else []
    num_read = 0
    for num_tokens in teach(learned, model, chain(first, documents), prefix=prefix):
        num_read += num_tokens
        say(f"{num_read:,} of at most {most_tokens:,} tokens read")
        if num_read >= most_tokens:
            break
    return dict(learned.tables()), num_read


def _texts(data: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[NDArray[np.int64]], int]:
    """The first documents, each with -1 after it, and how many empty ones were left out.

    They have as many tokens as a `SelfSpec` keeps, or more by a part of the last one.
    """
    texts: list[NDArray[np.int64]] = []
    size = num_left_out = 0
    for ids in read_ids(data, tokenizer):
        if ids is None:
            num_left_out += 1
            continue
        texts.append(np.append(ids, -1))
        size += len(texts[-1])
        if size >= MAX_TOKENS:
            break
    if not texts:
        raise _nothing(data)
    return texts, num_left_out


def _nothing(data: str) -> BuildError:
    return BuildError(f"--data must hold a document with text in it (got {data!r})")
