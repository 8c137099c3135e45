"""The grammars that logits processors of xgrammar, llguidance and outlines hold.

The matcher that a processor holds is never advanced: another one is made of its grammar. Without a
name below, such a processor works as ever, and nothing is drafted from its grammar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_KEPT = 4
_vocabularies: list[tuple[Any, dict[bytes, int]]] = []  # Listing one takes a third of a second.


def grammars_of(processors: Sequence[Any], num_rows: int) -> list[Any]:
    """A grammar for each row, by the first processor that holds one; None for rows without."""
    for processor in processors:
        if makers := _of_xgrammar(processor) or _of_llguidance(processor):
            return [makers[row % len(makers)]() for row in range(num_rows)]
    return [None] * num_rows


def _objects_in(processor: Any, library: str, name: str) -> list[Any]:
    """The objects of a class of a library that a processor holds, itself or in lists."""
    wanted = getattr(sys.modules.get(library), name, ())  # Nothing is an instance of ().
    values: list[Any] = []
    for value in getattr(processor, "__dict__", {}).values():
        values += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, wanted)]


def _of_xgrammar(processor: Any) -> list[Callable[[], Any]]:
    compiled = _objects_in(processor, "xgrammar", "CompiledGrammar")
    return [partial(_XGrammar, grammar) for grammar in compiled]


def _vocabulary(info: Any) -> dict[bytes, int]:
    """The token of each word of xgrammar's tokenizer; listed once for the last few tokenizers."""
    for known, words in list(_vocabularies):
        if known == info:
            return words
    special = set(info.special_token_ids)
    words = {word: i for i, word in enumerate(info.decoded_vocab) if word and i not in special}
    _vocabularies.append((info, words))
    del _vocabularies[:-_MAX_KEPT]
    return words


class _XGrammar:
    def __init__(self, grammar: Any) -> None:
        info = grammar.tokenizer_info
        self._words = _vocabulary(info)
        self._matcher = sys.modules["xgrammar"].GrammarMatcher(grammar)
        self._num_tokens = info.vocab_size
        self._mask = np.zeros((1, (info.vocab_size + 31) // 32), np.int32)

    def accept(self, token: int) -> bool:
        is_known = token < self._num_tokens and not self._matcher.is_terminated()
        return is_known and bool(self._matcher.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def mask(self) -> NDArray[np.uint32] | None:
        if self._matcher.is_terminated():
            return None
        is_limited = self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask[0].view(np.uint32) if is_limited else None

    def forced(self) -> list[int]:
        """The longest words of the forced text, as most tokenizers write short texts."""
        text, tokens = self._matcher.find_jump_forward_string().encode(), list[int]()
        while text:
            ends = range(len(text), 0, -1)
            end = next((end for end in ends if text[:end] in self._words), None)
            if end is None:
                break
            tokens.append(self._words[text[:end]])
            text = text[end:]
        return tokens


def _of_llguidance(processor: Any) -> list[Callable[[], Any]]:
    tokenizers = _objects_in(processor, "llguidance", "LLTokenizer")
    matchers = _objects_in(processor, "llguidance", "LLMatcher") if tokenizers else []
    return [partial(_LLGuidance, matcher, tokenizers[0].vocab_size) for matcher in matchers]


class _LLGuidance:
    def __init__(self, matcher: Any, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._matcher = matcher.deep_copy()
        self._matcher.reset()

    def accept(self, token: int) -> bool:
        # `consume_token` and a token that there is not leave errors that can't be taken back.
        return token < self._num_tokens and bool(self._matcher.try_consume_tokens([token]))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def mask(self) -> NDArray[np.uint32] | None:
        if self._matcher.is_error():
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        return None if self._matcher.is_error() else mask

    def forced(self) -> list[int]:
        return list(self._matcher.compute_ff_tokens())
