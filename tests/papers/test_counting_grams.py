"""Counts equal brute force, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.papers import grams
from selfspec.papers.grams import GramCounter
from tests.oracles import corpus_arrays, following, kept
from tests.strategies import texts

documents = st.lists(texts(max_size=40, alphabet=4), max_size=6)


def assert_tables(tables, expected):
    """The same arrays, dtypes included: the same bytes in a file."""
    arrays = tables.arrays()
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype, name
        assert array.tolist() == expected[name].tolist(), name


def expected_arrays(corpus, max_prefix, min_counts, max_continuations=8, token_dtype="uint16"):
    rows = kept(following(corpus, max_prefix), min_counts, max_continuations)
    return corpus_arrays(rows, max_prefix, token_dtype)


def counted(corpus, **settings):
    counter = GramCounter(**{"vocab_size": 4, **settings})
    for text in corpus:
        counter.add(text)
    return counter


def long_text(seed, size=3000):
    return np.random.default_rng(seed).integers(0, 4, size).tolist()


@given(st.data())
def test_counts_are_those_of_a_full_search(data):
    """Any documents, settings, vocabulary and chunks."""
    corpus = data.draw(documents)
    vocab_size = data.draw(st.sampled_from([4, 1 << 16, 70_000, (1 << 32) - 1]))
    corpus = [[vocab_size - 4 + token for token in text] for text in corpus]
    max_prefix = data.draw(st.integers(1, 8))
    min_count, max_continuations = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grams, "_CHUNK", data.draw(st.sampled_from([1, 30, 1000])))
        counter = counted(corpus, vocab_size=vocab_size, max_prefix=max_prefix)
    tables = counter.tables(min_count=min_count, max_continuations=max_continuations)
    min_counts = [min_count] * max_prefix
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    expected = expected_arrays(corpus, max_prefix, min_counts, max_continuations, dtype)
    assert_tables(tables, expected)
    assert tables.min_counts == tuple(min_counts)


def test_memory_is_bounded_and_the_frequent_stay(monkeypatch):
    """What is dropped is long and rare; the counts of single tokens and pairs stay exact."""
    monkeypatch.setattr(grams, "_CHUNK", 500)
    phrase = [1, 2, 3, 4, 5]
    rng = np.random.default_rng(0)
    corpus = [[*phrase, *rng.integers(0, 30, 60).tolist()] for _ in range(200)]
    counter = counted(corpus, vocab_size=30, max_memory=grams._GRAM_BYTES * 4000)
    assert sum(map(grams._size, counter._tries)) <= 4000
    tables = counter.tables(min_count=20)
    exact = counted(corpus, vocab_size=30).tables(min_count=20)
    for name in ("token.1", "total.1", "next_token.1", "next_count.1"):
        assert np.array_equal(tables.arrays()[name], exact.arrays()[name])
    prefixes = ()
    for token in phrase[:4]:
        prefixes = tables.step(prefixes, token)
    assert tables.continuations(4, prefixes[3], 1)[1][0] == (5, 200)


def test_min_count_is_raised_only_as_far_as_it_must():
    """Step by step, the longest prefixes first: the first that fits is taken."""
    corpus = [long_text(seed, 2000) for seed in range(2)]
    min_counts = [1, 1, 1, 1]
    seen = set()
    for max_bytes in (18_000, 14_000, 12_288):
        arrays = expected_arrays(corpus, 4, min_counts)
        while 8192 + sum(array.nbytes for array in arrays.values()) > max_bytes:
            min_counts[3 - sum(min_counts) % 4] += 1
            arrays = expected_arrays(corpus, 4, min_counts)
        tables = counted(corpus).tables(min_count=1, max_bytes=max_bytes)
        assert tables.min_counts == tuple(min_counts)
        assert_tables(tables, arrays)
        seen.add(tables.min_counts)
    assert len(seen) == 3


def test_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"0 to 3 \(got -1\)"):
        counted([[0, -1, 1]])
