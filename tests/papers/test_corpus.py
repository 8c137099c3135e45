"""Corpus candidates equal brute force; nothing in a file can do more harm than guess badly."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.draft.sources import RowStart
from selfspec.papers.corpus import CorpusSource, CorpusTables
from selfspec.records import DraftTree, StepRecord
from tests.oracles import corpus_arrays, corpus_candidates, following, kept
from tests.strategies import candidates_of, texts

VOCAB_SIZE = 8

documents = st.lists(texts(max_size=20, alphabet=5), max_size=4)


def rows_of(texts, max_prefix=3, min_count=1, max_continuations=8):
    return kept(following(texts, max_prefix), [min_count] * max_prefix, max_continuations)


def tables_of(texts, max_prefix=3, token_dtype="uint16", **pruning):
    rows = rows_of(texts, max_prefix, **pruning)
    return CorpusTables.from_arrays(corpus_arrays(rows, max_prefix, token_dtype))


def cursor_behind(tables, text, *, top_k=8):
    return CorpusSource(tables, top_k).open(RowStart(prompt_ids=text))


def committed(tokens):
    return StepRecord(row=0, tree=DraftTree.of_root(0), path=[0], committed_ids=tokens)


def named(candidates):
    return [(c.token, c.evidence) for c in candidates]


def halvings(count, total):
    """Into which half, quarter, … of certainty a share falls."""
    halved = 0
    while count * 2 ** (halved + 1) < total:
        halved += 1
    return min(halved, 6)


# -- what it says ------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    documents,
    texts(max_size=6, alphabet=6),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from(["uint16", "uint32"]),
)
def test_candidates_are_those_of_a_full_search(corpus, text, max_prefix, top_k, token_dtype):
    """The longest prefix first, then the more frequent token, each once, at most K."""
    tables = tables_of(corpus, max_prefix, token_dtype)
    cursor = cursor_behind(tables, text, top_k=top_k)
    expected = corpus_candidates(rows_of(corpus, max_prefix), text, max_prefix, top_k)
    candidates = candidates_of(cursor, cursor.root())
    assert [c.token for c in candidates] == [token for token, *_ in expected]
    for candidate, (_, length, count, total) in zip(candidates, expected, strict=True):
        bucket = 1 if count < 4 else 2 if count < 16 else 3
        assert candidate.evidence == ("corpus", length, 1, bucket, halvings(count, total))


@settings(deadline=None)
@given(documents, texts(max_size=6, alphabet=6), texts(max_size=6, alphabet=6))
def test_every_way_to_a_place_says_the_same(corpus, text, more):
    """By a prompt, by committed tokens, and by following tokens one at a time."""
    tables = tables_of(corpus)
    fresh = cursor_behind(tables, [*text, *more])
    expected = named(candidates_of(fresh, fresh.root()))
    grown = cursor_behind(tables, text)
    state = grown.root()
    for token in more:
        state = None if state is None else grown.follow(state, token)
    if state is not None:
        assert named(candidates_of(grown, state)) == expected
    grown.observe(committed(more))
    assert named(candidates_of(grown, grown.root())) == expected


def test_a_token_that_no_prefix_ends_in_is_not_followed():
    cursor = cursor_behind(tables_of([[1, 2, 3]]), [1])
    # Nothing ever came behind 3.
    assert [cursor.follow(cursor.root(), token) is None for token in (7, 3, 2)] == [
        True,
        True,
        False,
    ]


# -- hostile files -----------------------------------------------------------------------------


def walk(tables, depth=3):
    """Asks about everything within reach; gives all tokens that were named."""
    cursor = cursor_behind(tables, [1, 2, 3], top_k=4)
    tokens, states = [], [cursor.root()]
    for _ in range(depth):
        found = [candidates_of(cursor, state) for state in states]
        followed = [cursor.follow(state, token) for state in states for token in range(-1, 10)]
        assert all(len({c.token for c in some}) == len(some) <= 4 for some in found)
        tokens += [c.token for some in found for c in some]
        below = [c.state for some in found for c in some][:20] + followed[:20]
        states = [state for state in below if state is not None]
    return tokens


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_damaged_tables_do_no_harm(data):
    """Whatever stands between the ends of the offsets, and in all the other arrays."""
    arrays = corpus_arrays(rows_of([[1, 2, 3, 1, 2, 4, 1, 2, 3], [2, 3, 5, 6]]), 3)
    number = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 200, 2**16 - 1, 2**31, 2**32 - 1])
    for name in data.draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, unique=True)):
        array = arrays[name]
        is_offset = name.startswith(("child", "next."))
        inner = slice(1, -1) if is_offset else slice(None)
        size = len(array[inner])
        odd = data.draw(st.lists(number, min_size=size, max_size=size))
        array[inner] = np.array(odd, np.uint64).astype(array.dtype)
    tokens = walk(CorpusTables.from_arrays(arrays))
    assert all(token >= 0 for token in tokens)  # A tree leaves out what no model reads.


def with_one_more(arrays):
    return {**arrays, "child.2": arrays["child.1"]}


def changed(name, change):
    return lambda arrays: {**arrays, name: change(arrays[name])}


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("total.2", changed("total.2", lambda a: a.astype(np.uint16))),
        ("next.1", changed("next.1", lambda a: a.astype(">u4"))),
        ("token.1", changed("token.1", lambda a: a[0])),
        ("total.1", changed("total.1", lambda a: np.repeat(a, 2)[::2])),
        ("total.1", changed("total.1", lambda a: a[1:])),
        ("next.2", changed("next.2", lambda a: a + np.uint32(1))),
        ("child.1", changed("child.1", lambda a: a // 2)),
        ("child.1", lambda arrays: {n: a for n, a in arrays.items() if n != "child.1"}),
        ("child.2", with_one_more),
        ("0", lambda _: {}),
        ("9", lambda _: corpus_arrays({}, 9)),
    ],
)
def test_arrays_that_are_no_tables_are_refused(named, change):
    arrays = corpus_arrays(rows_of([[1, 2, 3, 1, 2, 4]]), 2)
    with pytest.raises(ValueError, match=re.escape(named)):
        CorpusTables.from_arrays(change(arrays))
