"""Counts equal brute force, whatever the chunks; merged tables are the sum of what each kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.building import grams
from selfspec.building.grams import GramCounter, merge_tables
from selfspec.draft.sources import CorpusTables
from tests.oracles import corpus_arrays, following, kept
from tests.strategies import texts

documents = st.lists(texts(max_size=40, alphabet=4), max_size=6)
MAX_PREFIX = 3


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


@pytest.mark.parametrize("merge", [False, True])
def test_min_count_is_raised_only_as_far_as_it_must(merge):
    """Step by step, the longest prefixes first: the first that fits is taken."""
    corpus = [long_text(seed, 2000) for seed in range(2)]
    min_counts = [1, 1, 1, 1]
    seen = set()
    for max_bytes in (18_000, 14_000, 12_288):
        arrays = expected_arrays(corpus, 4, min_counts)
        while 8192 + sum(array.nbytes for array in arrays.values()) > max_bytes:
            min_counts[3 - sum(min_counts) % 4] += 1
            arrays = expected_arrays(corpus, 4, min_counts)
        if merge:
            halves = [counted([text]).tables(min_count=1) for text in corpus]
            tables = merge_tables(halves, max_bytes=max_bytes)
        else:
            tables = counted(corpus).tables(min_count=1, max_bytes=max_bytes)
        assert tables.min_counts == tuple(min_counts)
        assert_tables(tables, arrays)
        seen.add(tables.min_counts)
    assert len(seen) == 3


def tables_of(rows, token_dtype="uint16", max_prefix=MAX_PREFIX):
    return CorpusTables.from_arrays(corpus_arrays(rows, max_prefix, token_dtype))


def rows_of(documents, min_count=1, max_continuations=8):
    return kept(following(documents, MAX_PREFIX), [min_count] * MAX_PREFIX, max_continuations)


def summed(tables, min_count, max_continuations):
    """The sum of all rows, without prefixes whose own beginning was lost."""
    totals, counts = {}, {}
    for rows in tables:
        for prefix, (total, pairs) in rows.items():
            totals[prefix] = totals.get(prefix, 0) + total
            for token, count in pairs:
                of_prefix = counts.setdefault(prefix, {})
                of_prefix[token] = of_prefix.get(token, 0) + count
    result = {}
    best = kept(counts, [min_count] * MAX_PREFIX, max_continuations)
    for prefix in sorted(best, key=len):
        if len(prefix) == 1 or prefix[:-1] in result:
            result[prefix] = (totals[prefix], best[prefix][1])
    return result


@given(
    st.lists(st.lists(texts(max_size=20, alphabet=4), max_size=3), min_size=1, max_size=4),
    st.tuples(*[st.integers(1, 3)] * 4),
)
def test_merged_tables_are_the_sum_of_what_they_kept(corpora, limits):
    """In any order; each part may have been pruned before."""
    before_count, before_best, min_count, max_continuations = limits
    parts = [rows_of(documents, before_count, before_best) for documents in corpora]
    limits = {"min_count": min_count, "max_continuations": max_continuations}
    expected = corpus_arrays(summed(parts, min_count, max_continuations), MAX_PREFIX)
    assert_tables(merge_tables([tables_of(rows) for rows in parts], **limits), expected)
    assert_tables(merge_tables([tables_of(rows) for rows in parts[::-1]], **limits), expected)


def test_tables_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="max_prefix"):
        merge_tables([tables_of({}), tables_of({}, max_prefix=2)])
    with pytest.raises(ValueError, match="9,000 bytes"):
        merge_tables([tables_of({})], max_bytes=1)
    turned = corpus_arrays(rows_of([[1, 2], [2, 3]]), MAX_PREFIX)
    turned["next.1"][1] = 7  # Where rows begin goes up and down, as in no table of ours.
    with pytest.raises(ValueError, match="negative"):
        merge_tables([CorpusTables.from_arrays(turned)])
    with pytest.raises(ValueError, match=r"0 to 3 \(got -1\)"):
        counted([[0, -1, 1]])
