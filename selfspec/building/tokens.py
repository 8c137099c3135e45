"""Turns documents into token ids, with chat templates, in the order of the documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.building.documents import Document, Message, in_parts
from selfspec.building.recipe import Recipe
from selfspec.cache import tokenizer_info

Ids = NDArray[np.uint32]

# What is tokenized at once. The tokenizer uses all cores for that.
_PART_DOCUMENTS, _PART_CHARACTERS = 256, 1 << 20
_NEUTRAL = "Hello"


class Encoder:
    """A tokenizer with a recipe's settings.

    Args:
        chat_template: Puts conversations through the tokenizer's template.
        prompts: Keeps only what comes before the first answer, ready to be answered.
    """

    def __init__(self, tokenizer: Any, *, chat_template: bool, prompts: bool = False) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._prompts = prompts

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Any) -> Encoder:
        """What encodes the documents of a recipe."""
        return cls(tokenizer, chat_template=recipe.uses_template, prompts=recipe.generates)

    def encode(self, documents: Sequence[Document]) -> list[Ids | None]:
        """The ids of each document; None if it is empty or if the template refuses it."""
        texts = [self._text(document) for document in documents]
        ids: list[Ids | None] = [None] * len(texts)
        for templated in (False, True):
            indices = [i for i, text in enumerate(texts) if text and text[1] == templated]
            encoded = self._ids([texts[i][0] for i in indices], templated)  # type: ignore[index]
            for index, each in zip(indices, encoded, strict=True):
                ids[index] = np.array(each, np.uint32) if len(each) else None
        return ids

    def _ids(self, texts: list[str], templated: bool) -> list[list[int]]:
        if not texts:
            return []
        # A template writes the special tokens itself.
        encoded = self._tokenizer(texts, add_special_tokens=not templated, verbose=False)
        return encoded["input_ids"]  # type: ignore[no-any-return]

    def _text(self, document: Document) -> tuple[str, bool] | None:
        """The text to tokenize, and whether a template wrote it."""
        if isinstance(document, str) and self._chat_template and self._prompts:
            document = [{"role": "user", "content": document}]
        if not isinstance(document, list):
            return (document, False) if document else None
        messages = _before_the_answer(document) if self._prompts else document
        if not messages:
            return None
        if not self._chat_template:
            return "\n\n".join(message["content"] for message in messages), False
        text = self._templated(messages)
        return (text, True) if text else None

    def _templated(self, messages: list[Message]) -> str | None:
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=self._prompts
            )
        except TemplateError:  # For example two turns of one speaker in a row.
            return None
        return text  # type: ignore[no-any-return]


def encode_all(documents: Iterable[Document], encoder: Encoder) -> Iterator[Ids | None]:
    """The ids of each document in order."""
    for part in in_parts(documents, _PART_DOCUMENTS, _PART_CHARACTERS):
        yield from encoder.encode(part)


def _before_the_answer(messages: list[Message]) -> list[Message]:
    roles = [message["role"] for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(messages)
    return messages[:end] if "user" in roles[:end] else []


def each_token(tokenizer: Any, skip: int = 0) -> Iterator[Ids]:
    """A model's own vocabulary as documents of one token each, mostly the frequent ones first."""
    for token in range(skip, tokenizer_info(tokenizer).vocab_size):
        yield np.array([token], np.uint32)


def prefix_of(recipe: Recipe, tokenizer: Any) -> Sequence[int]:
    """What each window stands behind: for single tokens the beginning of a chat, else nothing.

    The chat says nothing, so that the model goes on as in an answer. Without a chat template it is
    the beginning of a text.
    """
    if not recipe.reads_vocabulary:
        return ()
    encoder = Encoder(tokenizer, chat_template=recipe.chat_template, prompts=True)
    (ids,) = encoder.encode([_NEUTRAL if recipe.chat_template else "\n"])
    return () if ids is None else ids.tolist()
