"""Turns documents into token ids, with chat templates, in one process or several.

The ids come in the order of the documents and are the same for any number of workers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.building.documents import Document, Message, in_parts
from selfspec.building.recipe import Recipe
from selfspec.errors import BuildError
from selfspec.store import tokenizer_info

Ids = NDArray[np.uint32]

_CHUNK_DOCUMENTS = 256
_CHUNK_CHARACTERS = 1 << 20
_NEUTRAL = "Hello"


class Encoder:
    """A tokenizer with a recipe's settings. It is sent to worker processes by pickle.

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


def encode_all(
    documents: Iterable[Document], encoder: Encoder, workers: int
) -> Iterator[Ids | None]:
    """The ids of each document in order; each worker gets a few chunks ahead."""
    chunks = in_parts(documents, _CHUNK_DOCUMENTS, _CHUNK_CHARACTERS)
    if workers == 1:
        for chunk in chunks:
            yield from encoder.encode(chunk)
        return
    with _pool(encoder, workers) as pool:
        pending: deque[Future[list[Ids | None]]] = deque()
        for chunk in chunks:
            pending.append(pool.submit(_encode, chunk))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


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


@contextmanager
def _pool(encoder: Encoder, workers: int) -> Iterator[ProcessPoolExecutor]:
    # Workers are spawned, because a fork of a process with torch's threads may hang.
    context = get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(encoder,))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise BuildError(
            f"a worker process ended, maybe for lack of memory (got workers {workers}); "
            "go on with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder | None = None  # Set in a worker process, which serves one build.


def _begin(encoder: Encoder) -> None:
    """Prepares a worker: it ignores Ctrl-C, which the parent handles, and ends with the parent."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(chunk: list[Document]) -> list[Ids | None]:
    assert _encoder is not None
    return _encoder.encode(chunk)
