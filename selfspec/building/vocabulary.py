"""A model's own vocabulary as what a cache is built from: no data, and each token once.

A token is read behind the beginning of a chat that says nothing, so that the model goes on as in
an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from selfspec.building.recipe import Recipe
from selfspec.building.tokens import Encoder, Ids
from selfspec.store import tokenizer_info

_NEUTRAL = "Hello"


def num_tokens(tokenizer: Any) -> int:
    """How many tokens there are to read."""
    return tokenizer_info(tokenizer).vocab_size


def each_token(tokenizer: Any, skip: int = 0) -> Iterator[Ids]:
    """Documents of one token each, behind the first `skip`; mostly the frequent ones come first."""
    for token in range(skip, num_tokens(tokenizer)):
        yield np.array([token], np.uint32)


def prefix_of(recipe: Recipe, tokenizer: Any) -> Sequence[int]:
    """What each window stands behind: the beginning of a chat for single tokens, else nothing.

    Without a chat template it is the beginning of a text.
    """
    if not recipe.reads_vocabulary:
        return ()
    encoder = Encoder(tokenizer, chat_template=recipe.chat_template, prompts=True)
    (ids,) = encoder.encode([_NEUTRAL if recipe.chat_template else "\n"])
    return () if ids is None else ids.tolist()
