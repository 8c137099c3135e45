"""Turns documents into token ids, with chat templates, in the order of the documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from selfspec.building.documents import Document, Message, TokenIds, read_documents
from selfspec.building.recipe import Recipe
from selfspec.cache import tokenizer_info

_AT_ONCE = 16  # Documents that are tokenized together. The tokenizer uses all cores for that.
_NEUTRAL = "Hello"


def read_ids(recipe: Recipe, tokenizer: Any) -> Iterator[TokenIds | None]:
    """The token ids of each document; None if it is empty or if the template refuses it.

    Where the model answers, these are its prompts. A model's own vocabulary is read as documents of
    one token each, mostly the frequent ones first.
    """
    if recipe.reads_vocabulary:
        size = tokenizer_info(tokenizer).vocab_size
        return (np.array([token]) for token in range(size))
    documents = read_documents(recipe)
    parts = iter(lambda: list(islice(documents, _AT_ONCE)), [])
    return (ids for part in parts for ids in encode(part, recipe, tokenizer))


def prefix_of(recipe: Recipe, tokenizer: Any) -> list[int]:
    """What the model reads before each window: for single tokens the beginning of a chat.

    The chat says nothing, so that the model goes on as in an answer. Without a chat template it is
    the beginning of a text.
    """
    if not recipe.reads_vocabulary:
        return []
    asked = recipe.model_copy(update={"learn_from": "generations"})
    (ids,) = encode([_NEUTRAL if recipe.chat_template else "\n"], asked, tokenizer)
    return [] if ids is None else ids.tolist()


def encode(documents: Sequence[Document], recipe: Recipe, tokenizer: Any) -> list[TokenIds | None]:
    """The ids of each document, or of the prompt in it; None where there is none."""
    found: list[Any] = [each if isinstance(each, np.ndarray) else () for each in documents]
    texts = [_text_of(each, recipe, tokenizer) for each in documents]
    if any(texts):
        # A template writes the special tokens itself.
        encoded = tokenizer(
            [text for text in texts if text],
            add_special_tokens=not recipe.uses_template,
            verbose=False,
        )["input_ids"]
        indices = [index for index, text in enumerate(texts) if text]
        for index, ids in zip(indices, encoded, strict=True):
            found[index] = ids
    return [np.array(ids, np.int64) if len(ids) else None for ids in found]


def _text_of(document: Document, recipe: Recipe, tokenizer: Any) -> str | None:
    """The text to tokenize."""
    if isinstance(document, str) and recipe.uses_template:
        document = [{"role": "user", "content": document}]
    if not isinstance(document, list):
        return document if isinstance(document, str) else None
    messages = _before_the_answer(document) if recipe.generates else document
    if not messages:
        return None
    if not recipe.uses_template:
        return "\n\n".join(message["content"] for message in messages)
    return _templated(messages, recipe, tokenizer)


def _templated(messages: list[Message], recipe: Recipe, tokenizer: Any) -> str | None:
    from jinja2.exceptions import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=recipe.generates
        )
    except TemplateError:  # For example two turns of one speaker in a row.
        return None
    return text


def _before_the_answer(messages: list[Message]) -> list[Message]:
    roles = [message["role"] for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(messages)
    return messages[:end] if "user" in roles[:end] else []
