"""The grammars that logits processors of xgrammar, llguidance and outlines hold.

The matcher that a processor holds is never advanced: another one is made of its grammar. Without a
name below, such a processor works as ever, and nothing is drafted from its grammar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

NewTokenBytes = Callable[[Iterable[bytes]], Any]  # Makes a vocabulary of the bytes of each token.
_MAX_KEPT = 4
_vocabularies: list[tuple[Any, Any]] = []  # Listing one takes a third of a second.


def grammars_of(processors: Sequence[Any], num_rows: int, make: NewTokenBytes) -> list[Any]:
    """A grammar for each row, by the first processor that holds one; None for rows without."""
    for processor in processors:
        makers = _of_xgrammar(processor, make) or _of_llguidance(processor, make)
        if makers:
            return [makers[row % len(makers)]() for row in range(num_rows)]
    return [None] * num_rows


def _objects_in(processor: Any, library: str, name: str) -> list[Any]:
    """The objects of a class of a library that a processor holds, itself or in lists."""
    wanted = getattr(sys.modules.get(library), name, ())  # Nothing is an instance of ().
    values: list[Any] = []
    for value in getattr(processor, "__dict__", {}).values():
        values += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, wanted)]


def _vocabulary(tokenizer: Any, listed: Callable[[], Any]) -> Any:
    """The bytes of the tokens of a tokenizer, which are listed once for the last few tokenizers."""
    for known, vocabulary in list(_vocabularies):
        if known == tokenizer:
            return vocabulary
    vocabulary = listed()
    _vocabularies.append((tokenizer, vocabulary))
    del _vocabularies[:-_MAX_KEPT]
    return vocabulary


def _of_xgrammar(processor: Any, make: NewTokenBytes) -> list[Callable[[], Any]]:
    compiled = _objects_in(processor, "xgrammar", "CompiledGrammar")
    return [partial(_XGrammar, grammar, make) for grammar in compiled]


class _XGrammar:
    def __init__(self, grammar: Any, make: NewTokenBytes) -> None:
        info = grammar.tokenizer_info
        special = set(info.special_token_ids)
        self.token_bytes = _vocabulary(
            info,
            lambda: make(b"" if i in special else w for i, w in enumerate(info.decoded_vocab)),
        )
        self._matcher = sys.modules["xgrammar"].GrammarMatcher(grammar)
        self._num_tokens = info.vocab_size
        self._mask = np.zeros((1, (info.vocab_size + 31) // 32), np.int32)

    def accept(self, token: int) -> bool:
        is_known = token < self._num_tokens and not self._matcher.is_terminated()
        return is_known and bool(self._matcher.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def mask(self) -> NDArray[np.uint32] | None:
        if self._matcher.is_terminated():
            return None
        is_limited = self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask[0].view(np.uint32) if is_limited else None

    def forced(self) -> bytes:
        ended = self._matcher.is_terminated()
        return b"" if ended else self._matcher.find_jump_forward_string().encode()


def _of_llguidance(processor: Any, make: NewTokenBytes) -> list[Callable[[], Any]]:
    tokenizers = _objects_in(processor, "llguidance", "LLTokenizer")
    matchers = _objects_in(processor, "llguidance", "LLMatcher") if tokenizers else []
    return [partial(_LLGuidance, matcher, tokenizers[0], make) for matcher in matchers]


class _LLGuidance:
    def __init__(self, matcher: Any, tokenizer: Any, make: NewTokenBytes) -> None:
        special, decode = tokenizer.is_special_token, tokenizer.decode_bytes
        self.token_bytes = _vocabulary(
            tokenizer,
            lambda: make(b"" if special(i) else decode([i]) for i in range(tokenizer.vocab_size)),
        )
        self._num_tokens = tokenizer.vocab_size
        self._matcher = matcher.deep_copy()
        self._matcher.reset()

    def accept(self, token: int) -> bool:
        # `consume_token` and a token that there is not leave errors that can't be taken back.
        return token < self._num_tokens and bool(self._matcher.try_consume_tokens([token]))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def mask(self) -> NDArray[np.uint32] | None:
        if self._matcher.is_error():
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        return None if self._matcher.is_error() else mask

    def forced(self) -> bytes:
        return bytes(self._matcher.compute_ff_bytes())
