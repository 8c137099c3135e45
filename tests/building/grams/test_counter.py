"""Counts equal brute force, whatever the memory, the runs and the interruptions."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.building.grams import GramCounter
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


def counted(folder, corpus, **settings):
    counter = GramCounter(folder, vocab_size=4, **settings)
    for text in corpus:
        counter.add(text)
    return counter


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_counts_are_those_of_a_full_search(tmp_path_factory, data):
    """Any documents, settings, vocabulary, memory, and any runs."""
    corpus = data.draw(documents)
    vocab_size = data.draw(st.sampled_from([4, 1 << 16, 70_000, (1 << 32) - 1]))
    corpus = [[vocab_size - 4 + token for token in text] for text in corpus]
    max_prefix = data.draw(st.integers(1, 8))
    min_count, max_continuations = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    max_memory = data.draw(st.sampled_from([1, 4_000, 1_000_000]))
    folder = tmp_path_factory.mktemp("runs")
    counter = GramCounter(
        folder, vocab_size=vocab_size, max_prefix=max_prefix, max_memory=max_memory
    )
    for text in corpus:
        counter.add(text)
        if data.draw(st.booleans()):
            counter.flush()
    tables = counter.tables(min_count=min_count, max_continuations=max_continuations)
    assert_tables(
        tables,
        expected_arrays(
            corpus,
            max_prefix,
            [min_count] * max_prefix,
            max_continuations,
            "uint16" if vocab_size <= 1 << 16 else "uint32",
        ),
    )
    assert tables.min_counts == (min_count,) * max_prefix


def long_text(seed, size=3000):
    return np.random.default_rng(seed).integers(0, 4, size)


def test_the_order_of_documents_and_the_memory_do_not_matter(tmp_path):
    corpus = [long_text(seed) for seed in range(4)]
    whole = counted(tmp_path / "a", corpus)
    torn = counted(tmp_path / "b", corpus[::-1], max_memory=30_000)
    assert whole.flush() is not None
    assert len(torn.runs) > 20
    assert_tables(torn.tables(), whole.tables().arrays())


def test_more_runs_than_are_merged_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("selfspec.building.grams.runs._FAN_IN", 2)
    corpus = [long_text(seed, 300) for seed in range(4)]
    counter = counted(tmp_path, corpus, max_memory=10_000)
    assert len(counter.runs) > 8
    assert_tables(counter.tables(), expected_arrays([t.tolist() for t in corpus], 4, [2] * 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(counter.runs)


def test_asking_twice_and_going_on(tmp_path):
    counter = counted(tmp_path, [[0, 1, 2]])
    assert_tables(counter.tables(min_count=1), expected_arrays([[0, 1, 2]], 4, [1] * 4))
    counter.add([0, 1, 3])
    both = expected_arrays([[0, 1, 2], [0, 1, 3]], 4, [1] * 4)
    assert_tables(counter.tables(min_count=1), both)
    assert_tables(counter.tables(min_count=1), both)


def test_progress_ends_at_the_whole(tmp_path):
    seen = []
    counter = counted(tmp_path, [long_text(0)], max_memory=10_000)
    counter.tables(progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


# -- pruning -----------------------------------------------------------------------------------


def file_bytes(arrays):
    return 8192 + sum(array.nbytes for array in arrays.values())


def test_min_count_is_raised_only_as_far_as_it_must(tmp_path):
    """Step by step, the longest prefixes first: the first that fits is taken."""
    corpus = [long_text(seed, 2000).tolist() for seed in range(2)]
    counter = counted(tmp_path, corpus, max_memory=100_000)
    min_counts = [1, 1, 1, 1]
    seen = set()
    for max_bytes in (18_000, 14_000, 12_288):
        arrays = expected_arrays(corpus, 4, min_counts)
        while file_bytes(arrays) > max_bytes:
            min_counts[3 - sum(min_counts) % 4] += 1
            arrays = expected_arrays(corpus, 4, min_counts)
        tables = counter.tables(min_count=1, max_bytes=max_bytes)
        assert tables.min_counts == tuple(min_counts)
        assert_tables(tables, arrays)
        seen.add(tables.min_counts)
    assert len(seen) == 3


@pytest.mark.parametrize("memory", [10_000, 1_000_000])
def test_pruning_does_not_depend_on_what_came_first(tmp_path, memory):
    corpus = [long_text(seed, 2000) for seed in range(2)]
    counter = counted(tmp_path / "a", corpus, max_memory=memory)
    whole = counted(tmp_path / "b", corpus[::-1])
    expected = whole.tables(max_bytes=12_288)
    tables = counter.tables(max_bytes=12_288)
    assert tables.min_counts == expected.min_counts
    assert_tables(tables, expected.arrays())


# -- runs that are there already ---------------------------------------------------------------


def test_an_interrupted_count_goes_on(tmp_path):
    first = counted(tmp_path, [[0, 1, 2]])
    first.flush()
    first.add([3, 3, 3])  # never flushed, so lost
    second = counted(tmp_path, [[0, 1, 3]])
    assert second.runs == first.runs
    expected = expected_arrays([[0, 1, 2], [0, 1, 3]], 4, [1] * 4)
    assert_tables(second.tables(min_count=1), expected)


def test_only_the_runs_that_are_named_count(tmp_path):
    """A run that was written after the last note of how far it came is counted anew."""
    first = counted(tmp_path, [[0, 1, 2]])
    noted = [first.flush().name]
    first.add([3, 3, 3])
    unnoted = first.flush()
    (tmp_path / "000009.tmp").write_bytes(b"torn")
    (tmp_path / "merging-x").mkdir()
    (tmp_path / "notes.json").write_text("{}", encoding="utf-8")
    second = GramCounter(tmp_path, vocab_size=4, runs=noted)
    assert not unnoted.exists()
    assert {path.name for path in tmp_path.iterdir()} == {*noted, "notes.json"}
    assert_tables(second.tables(min_count=1), expected_arrays([[0, 1, 2]], 4, [1] * 4))


def test_a_lost_run_is_missed(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold the run 000000\.v4\.n4\.run"):
        GramCounter(tmp_path, vocab_size=4, runs=["000000.v4.n4.run"])


def test_runs_of_other_settings_are_refused(tmp_path):
    counted(tmp_path, [[0, 1, 2]]).flush()
    with pytest.raises(
        ValueError, match=r"runs must be \*\.v5\.n4\.run \(got 000000\.v4\.n4\.run\)"
    ):
        GramCounter(tmp_path, vocab_size=5)
    with pytest.raises(ValueError, match=r"\*\.v4\.n3\.run"):
        GramCounter(tmp_path, vocab_size=4, max_prefix=3)
    GramCounter(tmp_path, vocab_size=4, max_prefix=3, runs=[])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_flush_leaves_no_torn_run(tmp_path, monkeypatch):
    def interrupt(_handle):
        raise KeyboardInterrupt

    counter = counted(tmp_path, [[0, 1, 2]])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            counter.flush()
    assert list(tmp_path.glob("*.run")) == counter.runs == []
    assert_tables(
        GramCounter(tmp_path / "other", vocab_size=4).tables(), expected_arrays([], 4, [1] * 4)
    )
    expected = expected_arrays([[0, 1, 2]], 4, [1] * 4)
    assert_tables(counter.tables(min_count=1), expected)  # nothing was lost in memory
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_flush_of_nothing_writes_nothing(tmp_path):
    counter = counted(tmp_path, [[], []])
    assert counter.flush() is None
    counter.add([1, 2])
    assert counter.flush() is not None
    assert counter.flush() is None
    assert len(counter.runs) == 1


def test_a_counter_says_when_it_is_full(tmp_path):
    """Whoever flushes then has no run that ends amid a document."""
    counter = GramCounter(tmp_path, vocab_size=4, max_memory=100_000)
    while not counter.full:
        counter.add([0, 1, 2, 3])
        assert counter.runs == []
    counter.flush()
    assert not counter.full


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [-1, 4, 1 << 40])
def test_tokens_beyond_the_vocabulary_are_refused(tmp_path, odd):
    counter = GramCounter(tmp_path, vocab_size=4)
    with pytest.raises(ValueError, match=rf"token ids must be 0 to 3 \(got {odd}\)"):
        counter.add([0, odd, 1])
    assert counter.flush() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_prefix": 0}, r"max_prefix must be 1 to 8 \(got 0\)"),
        ({"max_prefix": 9}, r"max_prefix must be 1 to 8 \(got 9\)"),
        ({"vocab_size": 0}, r"vocab_size must be 1 to 2\*\*32 - 1 \(got 0\)"),
    ],
)
def test_settings_that_can_not_be_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        GramCounter(tmp_path, **({"vocab_size": 4} | settings))


@pytest.mark.parametrize("name", ["min_count", "max_continuations", "max_bytes"])
def test_pruning_that_can_not_be_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name} must be >= \d+ \(got 0\)"):
        GramCounter(tmp_path, vocab_size=4).tables(**{name: 0})
