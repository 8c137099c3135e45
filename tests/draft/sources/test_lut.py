"""The LUTs of both orders: the newest row wins, accepted nodes win over rejected ones."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.draft.calibration import Calibration
from selfspec.draft.memory import DraftMemory
from selfspec.draft.sources import REGISTRY, LutSource, RowStart
from selfspec.records import DraftTree, StepRecord, TopK
from tests.strategies import candidates_of

V = 50
Pair = tuple[int, int]
pair_lists = st.lists(st.tuples(st.integers(-1, V - 1), st.integers(0, V - 1)), max_size=40)


def top(*rows: list[tuple[int, float]]) -> TopK:
    """One row for each pair, each of (token, probability)."""
    return TopK(
        np.array([[token for token, _ in row] for row in rows], np.int32),
        np.array([[p for _, p in row] for row in rows], np.float16),
    )


def teach(source: LutSource, pairs: dict[Pair, int] | list[tuple[Pair, int]]) -> None:
    """Behind each pair come a token and the one after it."""
    items = list(pairs.items()) if isinstance(pairs, dict) else pairs
    ids = np.array([[token, token + 1] for _, token in items], np.int32).reshape(-1, 2)
    before = np.array([pair for pair, _ in items], np.int64).reshape(-1, 2)
    source.observe_pairs(before, TopK(ids, np.full(ids.shape, 0.3, np.float16)))


def held(source: LutSource, pair: Pair) -> list[int]:
    return [token for token, _ in source.next_tokens(pair)]


orders = pytest.mark.parametrize("order", [1, 2])


@orders
def test_learning_replaces_a_row_whole_and_the_last_of_several_wins(order: int) -> None:
    source = LutSource(V, 2, order=order)
    teach(source, {(2, 4): 5})
    assert held(source, (2, 4)) == [5, 6]
    teach(source, [((2, 4), 7), ((2, 4), 9), ((-1, 3), 1)])
    assert held(source, (2, 4)) == [9, 10]
    assert held(source, (8, 4)) == ([9, 10] if order == 1 else [])
    assert held(source, (-1, 3)) == ([1, 2] if order == 1 else [])
    assert held(source, (2, 5)) == []


@orders
def test_candidates_come_with_rank_and_bin_and_lead_to_their_own_row(order: int) -> None:
    source = LutSource(10, 3, order=order)
    source.observe_pairs(np.array([[3, 4]]), top([(5, 0.6), (6, 0.3), (7, 0.01)]))
    cursor = source.open(RowStart(prompt_ids=[3, 4]))
    candidates = candidates_of(cursor, cursor.root())
    assert [c.token for c in candidates] == [5, 6, 7]
    assert [c.state for c in candidates] == [(4, 5), (4, 6), (4, 7)]
    assert [c.evidence.rank for c in candidates] == [1, 2, 3]
    assert [c.evidence.probability_bin for c in candidates] == [0, 1, 6]
    assert {c.evidence.source for c in candidates} == {source.name} <= {"lut", "lut2"}
    assert cursor.follow(cursor.root(), 8) == (4, 8)


@given(st.floats(0, 1))
def test_bins_count_halvings_of_the_stored_probability(probability: float) -> None:
    source = LutSource(2, 1)
    source.observe_pairs(np.array([[-1, 0]]), top([(1, probability)]))
    bin_ = source.next_tokens((-1, 0))[0][1].probability_bin
    stored = float(np.float16(probability))
    if bin_ < 6:
        assert 0.5 ** (bin_ + 1) <= stored < 0.5**bin_ or (stored == 1.0 and bin_ == 0)
    else:
        assert stored < 0.5**6


@pytest.mark.parametrize("broken", [np.nan, -np.nan])
def test_a_nan_probability_is_the_least_likely(broken: float) -> None:
    """Half-precision models overflow now and then, and stock goes on."""
    source = LutSource(10, 2)
    source.observe_pairs(np.array([[-1, 4]]), top([(5, broken), (6, 0.9)]))
    assert [kind.probability_bin for _, kind in source.next_tokens((-1, 4))] == [6, 0]


def step(path: list[int], *, learned: bool = True) -> StepRecord:
    """A root 1 with two children that carry the same token 2 further down the tree.

    ::

        1 ── 2 ── 3
        └─── 4 ── 2
    """
    tree = DraftTree.of_root(1)
    tree.add(tree.add(0, 2, 0.5), 3, 0.4)
    tree.add(tree.add(0, 4, 0.3), 2, 0.2)
    rows = top(*([(10 + node, 0.5)] for node in range(len(tree)))) if learned else None
    committed = [*(tree.tokens[node] for node in path[1:]), 9]
    return StepRecord(row=0, tree=tree, path=path, committed_ids=committed, above=8, top=rows)


def observe(source: LutSource, *records: StepRecord) -> None:
    DraftMemory([source], Calibration(), top_k=1).observe_steps(records)


def test_every_node_is_learned_from_and_accepted_ones_win() -> None:
    """Node 1 and node 4 both carry token 2: of the rejected ones the last, else the accepted."""
    source = LutSource(V, 1)
    observe(source, step([0, 1]), step([0]))  # Of two rows the last one wins.
    assert [held(source, (0, t)) for t in (1, 2, 3, 4)] == [[10], [14], [12], [13]]
    observe(source, step([0, 1]))
    assert [held(source, (0, t)) for t in (1, 2, 3, 4)] == [[10], [11], [12], [13]]


def test_every_node_teaches_its_pair_and_the_root_that_of_the_text() -> None:
    source = LutSource(V, 1, order=2)
    observe(source, step([0, 1]))
    for pair, token in {(8, 1): 10, (1, 2): 11, (2, 3): 12, (1, 4): 13, (4, 2): 14}.items():
        assert held(source, pair) == [token]


@orders
def test_a_cursor_stands_behind_what_was_committed(order: int) -> None:
    source = LutSource(V, 1, order=order)
    cursor = source.open(RowStart(prompt_ids=[5, 1]))
    assert cursor.root() == (5, 1)
    cursor.observe(step([0, 1]))
    assert cursor.root() == (2, 9)
    cursor.observe(step([0]))
    assert cursor.root() == (9, 9)
    for prompt, root in (([], (-1, -1)), ([7], (-1, 7))):
        short = source.open(RowStart(prompt_ids=prompt))
        assert (short.root(), short.expand(root)) == (root, [])


def test_a_step_without_logits_teaches_nothing() -> None:
    source = LutSource(V, 1)
    observe(source, step([0, 1], learned=False))
    assert source.arrays()["ids"].size == 0


@given(pair_lists, st.sampled_from([2, 4, 16]))
def test_what_is_found_is_what_was_last_taught_for_the_very_pair(
    pairs: list[Pair], slot_bits: int
) -> None:
    """Whatever shares a slot: another pair's row is never given out."""
    source = LutSource(V, 2, order=2, slot_bits=slot_bits)
    teach(source, [(pair, number) for number, pair in enumerate(pairs)])
    truth = {pair: [i, i + 1] for i, pair in enumerate(pairs) if pair[0] >= 0}
    found = {pair: held(source, pair) for pair in truth}
    assert all(found[pair] in ([], truth[pair]) for pair in truth)
    if pairs and pairs[-1][0] >= 0:
        assert found[pairs[-1]] == truth[pairs[-1]]
    if slot_bits == 16:
        missing = sum(not tokens for tokens in found.values())
        assert missing <= 1  # 40 pairs hardly ever meet in so many slots


@orders
def test_arrays_come_back_as_they_were_and_leave_out_what_is_empty(order: int) -> None:
    source, key = LutSource(V, 2, order=order), ("tokens", "pairs")[order - 1]
    teach(source, {(2, 7): 5, (2, 4): 1, (1, 9): 3})
    arrays = source.arrays()
    assert arrays[key].tolist() == ([4, 7, 9] if order == 1 else [[1, 9], [2, 4], [2, 7]])
    for top_k, num_kept in ((2, 2), (1, 1), (4, 2)):  # of another K: cut or filled up
        twin = LutSource(V + 2, top_k, order=order)  # a model whose logits are wider
        twin.restore(arrays)
        assert held(twin, (2, 4)) == [1, 2][:num_kept]
        assert twin.arrays()[key].tolist() == arrays[key].tolist()


def test_memory_is_as_promised() -> None:
    assert REGISTRY["lut"](128_256, 8).nbytes <= 6.2e6
    assert REGISTRY["lut2"](128_256, 8).nbytes == REGISTRY["lut2"](100, 8).nbytes <= 7.4e6


class YieldingTable(np.ndarray):
    """Lets the other thread run between one table's access and the other's."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        time.sleep(0)
        return row

    def __setitem__(self, index, row):
        super().__setitem__(index, row)
        time.sleep(0)


def test_learning_and_reading_from_several_threads_never_mix_two_rows() -> None:
    """Both halves of a row come from one write: token 1 is sure, token 2 is not."""
    source, pair = LutSource(4, 2), np.array([[-1, 0]])
    source.token_ids = source.token_ids.view(YieldingTable)
    sure, unsure = top([(1, 0.9), (1, 0.9)]), top([(2, 0.01), (2, 0.01)])
    source.observe_pairs(pair, sure)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            source.observe_pairs(pair, sure)
            source.observe_pairs(pair, unsure)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        reads = [source.next_tokens((-1, 0)) for _ in range(200)]
        copies = [source.copy().next_tokens((-1, 0)) for _ in range(100)]
    finally:
        stop.set()
        writer.join()
    for candidates in reads + copies:
        kinds = {(token, kind.probability_bin) for token, kind in candidates}
        assert kinds in ({(1, 0)}, {(2, 6)})


@orders
def test_tokens_beyond_the_vocabulary_are_not_known(order: int) -> None:
    """A model may read more ids than it says; as pairs they would share the key of another one."""
    source = LutSource(10, 2, order=order)
    teach(source, {(2, 14): 5, (14, 2): 6})
    assert [held(source, pair) for pair in ((2, 14), (3, 4))] == [[], []]
    assert held(source, (14, 2)) == ([6, 7] if order == 1 else [])
