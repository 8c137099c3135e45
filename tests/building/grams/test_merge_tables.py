"""Merged tables are the sum of what each kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.building.grams import merge_tables
from selfspec.draft.sources import CorpusTables
from tests.building.grams.test_counter import assert_tables
from tests.oracles import corpus_arrays, following, kept
from tests.strategies import texts

MAX_PREFIX = 3

corpora = st.lists(st.lists(texts(max_size=20, alphabet=4), max_size=3), min_size=1, max_size=4)


def tables_of(rows, token_dtype="uint16", max_prefix=MAX_PREFIX):
    return CorpusTables.from_arrays(corpus_arrays(rows, max_prefix, token_dtype))


def rows_of(documents, min_count=1, max_continuations=8):
    counts = following(documents, MAX_PREFIX)
    return kept(counts, [min_count] * MAX_PREFIX, max_continuations)


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


@settings(deadline=None)
@given(corpora)
def test_unpruned_tables_merge_to_those_of_all_documents(corpora):
    merged = merge_tables([tables_of(rows_of(documents)) for documents in corpora])
    together = rows_of([text for documents in corpora for text in documents])
    assert_tables(merged, corpus_arrays(together, MAX_PREFIX))


@settings(deadline=None)
@given(corpora, st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_pruned_tables_merge_to_the_sum_of_what_they_kept(
    corpora, before_count, before_best, min_count, max_continuations
):
    """In any order."""
    parts = [rows_of(documents, before_count, before_best) for documents in corpora]
    limits = {"min_count": min_count, "max_continuations": max_continuations}
    expected = corpus_arrays(summed(parts, min_count, max_continuations), MAX_PREFIX)
    assert_tables(merge_tables([tables_of(rows) for rows in parts], **limits), expected)
    assert_tables(merge_tables([tables_of(rows) for rows in parts[::-1]], **limits), expected)


def test_the_wider_tokens_win():
    rows = rows_of([[1, 2, 3]])
    merged = merge_tables([tables_of(rows), tables_of(rows, "uint32")])
    assert merged.arrays()["next_token.2"].dtype == "uint32"


def test_a_size_is_kept_to():
    texts = [[i % 7, i % 11, i % 13, i % 5] * 3 for i in range(400)]
    halves = (texts[::2], texts[1::2])
    parts = [tables_of(rows_of(half, max_continuations=20)) for half in halves]
    merged = merge_tables(parts, max_bytes=12_288)
    assert max(merged.min_counts) > 1
    assert 8_192 + merged.nbytes <= 12_288
    rows = kept(following(texts, MAX_PREFIX), merged.min_counts, 8)
    assert_tables(merged, corpus_arrays(rows, MAX_PREFIX))


def test_tables_that_do_not_match_are_refused():
    short = tables_of({}, max_prefix=2)
    with pytest.raises(ValueError, match=r"same max_prefix \(got \[2, 3\]\)"):
        merge_tables([tables_of({}), short])
    with pytest.raises(ValueError, match=r"same max_prefix \(got none\)"):
        merge_tables([])


def test_counts_stop_at_what_the_arrays_can_hold():
    arrays = corpus_arrays(rows_of([[1, 2]]), MAX_PREFIX)
    arrays["next_count.1"][:] = arrays["total.1"][:] = 2**32 - 1
    tables = CorpusTables.from_arrays(arrays)
    assert merge_tables([tables, tables]).continuations(1, 0, 8) == (2**32 - 1, [(2, 2**32 - 1)])
