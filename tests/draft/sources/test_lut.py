"""The LUT pair: newest row wins, accepted nodes win over rejected ones, small and shareable."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.draft.sources import REGISTRY, LutSource
from selfspec.records import DraftTree, StepRecord, TopK
from tests.strategies import candidates_of


def top(*rows: list[tuple[int, float]]) -> TopK:
    """One row a place, each of (token, probability)."""
    return TopK(
        np.array([[token for token, _ in row] for row in rows], np.int32),
        np.array([[p for _, p in row] for row in rows], np.float16),
    )


def held(source: LutSource, token: int) -> list[int]:
    return [token for token, _ in source.next_tokens(token)]


def test_learning_replaces_a_row_whole():
    source = LutSource(10, 2)
    source.learn([4], top([(5, 0.9), (6, 0.1)]))
    source.learn([4], top([(7, 0.4), (5, 0.3)]))
    assert held(source, 4) == [7, 5]
    assert held(source, 3) == []


def test_of_a_repeated_token_the_last_wins():
    source = LutSource(10, 1)
    pairs = np.array([[-1, 4], [4, 2], [2, 4]])
    source.observe_pairs(pairs, top([(5, 0.9)], [(6, 0.9)], [(7, 0.9)]))
    assert held(source, 4) == [7]
    assert held(source, 2) == [6]


def test_candidates_come_with_rank_and_bin_and_lead_to_their_own_row():
    source = LutSource(10, 3)
    source.learn([4], top([(5, 0.6), (6, 0.3), (7, 0.01)]))
    cursor = source.open([4], learns=True)
    candidates = candidates_of(cursor, cursor.root())
    assert [c.token for c in candidates] == [c.state for c in candidates] == [5, 6, 7]
    assert [c.evidence.rank for c in candidates] == [1, 2, 3]
    assert [c.evidence.probability_bin for c in candidates] == [0, 1, 6]
    assert {c.evidence.source for c in candidates} == {"lut"}
    assert cursor.follow(4, 8) == 8


@given(st.floats(0, 1))
def test_bins_count_halvings_of_the_stored_probability(probability):
    source = LutSource(2, 1)
    source.learn([0], top([(1, probability)]))
    bin_ = source.next_tokens(0)[0][1].probability_bin
    stored = float(np.float16(probability))
    if bin_ < 6:
        assert 0.5 ** (bin_ + 1) <= stored < 0.5**bin_ or (stored == 1.0 and bin_ == 0)
    else:
        assert stored < 0.5**6


@pytest.mark.parametrize("broken", [np.nan, -np.nan])
def test_a_nan_probability_is_the_least_likely(broken):
    """Half-precision models overflow now and then, and stock goes on."""
    source = LutSource(10, 2)
    source.learn([4], top([(5, broken), (6, 0.9)]))
    bins = [kind.probability_bin for _, kind in source.next_tokens(4)]
    assert bins == [6, 0]


def step(path: list[int], committed: list[int], *, learned: bool = True) -> StepRecord:
    """A root 1 with two children that carry the same token 2 further down the tree.

    ::

        1 ── 2 ── 3
        └─── 4 ── 2
    """
    tree = DraftTree.of_root(1)
    tree.add(tree.add(0, 2, 0.5), 3, 0.4)
    tree.add(tree.add(0, 4, 0.3), 2, 0.2)
    rows = top(*([(10 + node, 0.5)] for node in range(len(tree))))
    return StepRecord(
        row=0, tree=tree, path=path, committed_ids=committed, top=rows if learned else None
    )


def test_every_node_is_learned_from_and_accepted_ones_win():
    """Node 1 and node 4 both carry token 2: of the rejected ones the last, else the accepted."""
    source = LutSource(10, 1)
    source.open([1], learns=True).observe(step([0], [9]))
    assert [held(source, t) for t in (1, 2, 3, 4)] == [[10], [14], [12], [13]]
    source.open([1], learns=True).observe(step([0, 1], [2, 9]))
    assert [held(source, t) for t in (1, 2, 3, 4)] == [[10], [11], [12], [13]]


def test_a_cursor_stands_behind_what_was_committed():
    cursor = LutSource(10, 1).open([5, 6], learns=True)
    assert cursor.root() == 6
    cursor.observe(step([0, 1], [2, 9]))
    assert cursor.root() == 9
    assert LutSource(10, 1).open([], learns=True).root() is None
    assert LutSource(10, 1).open([], learns=True).expand(None) == []


@pytest.mark.parametrize(("learns", "learned"), [(False, True), (True, False)])
def test_a_frozen_cursor_and_a_step_without_logits_teach_nothing(learns, learned):
    source = LutSource(10, 1)
    cursor = source.open([1], learns=learns)
    cursor.observe(step([0, 1], [2, 9], learned=learned))
    assert int((source.rows.token_ids >= 0).sum()) == 0
    assert cursor.root() == 9


def test_a_copy_is_independent_both_ways():
    source = LutSource(10, 1)
    source.learn([4], top([(5, 0.5)]))
    twin = source.copy()
    twin.learn([4], top([(6, 0.5)]))
    source.learn([3], top([(7, 0.5)]))
    assert (held(source, 4), held(twin, 4)) == ([5], [6])
    assert (held(source, 3), held(twin, 3)) == ([7], [])


def test_arrays_come_back_as_they_were_and_leave_out_what_is_empty():
    source, twin = LutSource(10, 2), LutSource(12, 2)
    source.learn([7, 4], top([(5, 0.5), (6, 0.2)], [(1, 0.9), (2, 0.1)]))
    arrays = source.arrays()
    assert arrays["tokens"].tolist() == [4, 7]
    twin.restore(arrays)  # a model whose logits are wider
    assert (held(twin, 4), held(twin, 7), held(twin, 5)) == ([1, 2], [5, 6], [])
    for name, array in twin.arrays().items():
        np.testing.assert_array_equal(array, arrays[name])


def test_rows_of_another_k_are_cut_or_filled_up():
    source = LutSource(10, 2)
    source.learn([4], top([(5, 0.5), (6, 0.2)]))
    for top_k, expected in ((1, [5]), (4, [5, 6])):
        twin = LutSource(10, top_k)
        twin.restore(source.arrays())
        assert held(twin, 4) == expected


def test_the_pair_fits_its_promise():
    source = REGISTRY["lut"](128_256, 8)
    assert source.rows.nbytes <= 6.2e6
    assert source.rows.token_ids.shape == source.rows.probabilities.shape == (128_256, 8)


class YieldingTable(np.ndarray):
    """Lets the other thread run between one table's access and the other's."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        time.sleep(0)
        return row

    def __setitem__(self, index, row):
        super().__setitem__(index, row)
        time.sleep(0)


def test_learning_and_reading_from_several_threads_never_mix_two_rows():
    """Both halves of a row come from one write: token 1 is sure, token 2 is not."""
    source = LutSource(4, 2)
    source.rows.token_ids = source.rows.token_ids.view(YieldingTable)
    sure, unsure = top([(1, 0.9), (1, 0.9)]), top([(2, 0.01), (2, 0.01)])
    source.learn([0], sure)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            source.learn([0], sure)
            source.learn([0], unsure)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        reads = [source.next_tokens(0) for _ in range(200)]
        copies = [source.copy().next_tokens(0) for _ in range(100)]
    finally:
        stop.set()
        writer.join()
    for candidates in reads + copies:
        kinds = {(token, kind.probability_bin) for token, kind in candidates}
        assert kinds in ({(1, 0)}, {(2, 6)})


def test_a_token_beyond_the_vocabulary_is_not_known():
    """A model may read more ids than it says."""
    source = LutSource(10, 1)
    source.observe_pairs(np.array([[4, 10], [4, 3]]), top([(5, 0.9)], [(6, 0.9)]))
    assert held(source, 10) == []
    assert held(source, 3) == [6]
