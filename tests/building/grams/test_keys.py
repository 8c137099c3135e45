"""Packed n-grams sort as their tokens do, and give them back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.building.grams.keys import GramKeys, add_up

vocab_sizes = st.sampled_from([1, 2, 255, 256, 128_256, (1 << 32) - 1])


@given(st.data(), vocab_sizes, st.integers(1, 9))
def test_keys_sort_as_tuples_do(data, vocab_size, length):
    stored = data.draw(st.lists(st.integers(0, vocab_size), max_size=20))
    keys = GramKeys(vocab_size, length)
    words = keys.pack(np.array(stored, np.uint32))
    grams = [tuple(stored[i : i + length]) for i in range(len(stored) - length + 1)]
    unpacked = [keys.tokens(words, place).tolist() for place in range(length)]
    assert list(zip(*unpacked, strict=True)) == grams
    ordered = [gram for _, gram in sorted(zip(words.T.tolist(), grams, strict=True))]
    assert ordered == sorted(grams)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 5))))
def test_equal_keys_are_joined(rows):
    words = np.array([row[:2] for row in rows], np.uint64).reshape(-1, 2).T
    joined = add_up(words, np.array([row[2] for row in rows], np.int64))
    sums: dict[tuple[int, int], int] = {}
    for high, low, count in rows:
        sums[high, low] = sums.get((high, low), 0) + count
    assert list(map(tuple, joined.words.T.tolist())) == sorted(sums)
    assert joined.counts.tolist() == [sums[key] for key in sorted(sums)]
    assert add_up(words).counts.sum() == len(rows)


@pytest.mark.parametrize(
    ("vocab_size", "length", "num_words"),
    [(128_256, 5, 2), (128_256, 9, 3), (4095, 5, 1), (4096, 5, 2), (32_000, 4, 1), (1, 9, 1)],
)
def test_no_more_words_than_the_vocabulary_needs(vocab_size, length, num_words):
    assert GramKeys(vocab_size, length).num_words == num_words
