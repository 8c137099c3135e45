"""Packs n-grams into sortable keys of as few 64-bit words as they need."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # (number of words, number of n-grams), the first word most significant


class Counted(NamedTuple):
    """Different n-grams in lexicographic order, and how often each came."""

    words: Words
    counts: NDArray[np.int64]


class GramKeys:
    """How n-grams of `length` tokens are packed.

    A token is stored as its id plus one. A 0 means that the document has ended.

    >>> keys = GramKeys(vocab_size=1000, length=3)
    >>> stored = np.array([8, 9, 0, 0, 0], np.uint32)
    >>> [keys.tokens(keys.pack(stored), position).tolist() for position in range(3)]
    [[8, 9, 0], [9, 0, 0], [0, 0, 0]]
    """

    def __init__(self, vocab_size: int, length: int) -> None:
        self.length = length
        self._bits = vocab_size.bit_length()
        self._in_a_word = 64 // self._bits
        self.num_words = -(-length // self._in_a_word)

    def pack(self, stored: NDArray[np.uint32]) -> Words:
        """The n-grams that start at each token but the last `length - 1`."""
        num_grams = max(len(stored) - self.length + 1, 0)
        words = np.zeros((self.num_words, num_grams), np.uint64)
        for position in range(self.length):
            word, shift = self._at(position)
            words[word] |= stored[position : position + num_grams].astype(np.uint64) << shift
        return words

    def tokens(self, words: Words, position: int) -> NDArray[np.uint32]:
        """The stored tokens at one position within each n-gram."""
        word, shift = self._at(position)
        mask = np.uint64((1 << self._bits) - 1)
        return np.asarray((words[word] >> shift) & mask, np.uint32)

    def _at(self, position: int) -> tuple[int, np.uint64]:
        word, within = divmod(position, self._in_a_word)
        return word, np.uint64(self._bits * (self._in_a_word - 1 - within))


def add_up(words: Words, counts: NDArray[Any] | None = None) -> Counted:
    """Sorts n-grams and joins equal ones; without `counts` each counts once."""
    if not words.shape[1]:
        return Counted(words, np.zeros(0, np.int64))
    order = np.lexsort(words[::-1])
    words = words[:, order]
    new = np.ones(words.shape[1], bool)
    new[1:] = (words[:, 1:] != words[:, :-1]).any(axis=0)
    starts = np.flatnonzero(new)
    if counts is None:
        return Counted(words[:, starts], np.diff(starts, append=words.shape[1]))
    return Counted(words[:, starts], np.add.reduceat(counts[order], starts))
