"""The second-order LUT equals a dict while no two pairs share a slot; a collision is a miss."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.draft.sources import REGISTRY, Lut2Source
from selfspec.records import DraftTree, StepRecord, TopK
from tests.strategies import candidates_of

V = 50
pair_lists = st.lists(st.tuples(st.integers(-1, V - 1), st.integers(0, V - 1)), max_size=40)


def top(*firsts: int) -> TopK:
    """One row a place: its first token is given, the second is the one behind it."""
    ids = np.array([[first, first + 1] for first in firsts], np.int32).reshape(-1, 2)
    return TopK(ids, np.full(ids.shape, 0.3, np.float16))


def taught(*pairs: tuple[int, int], slot_bits: int = 16) -> Lut2Source:
    """A table in which pair number i is followed by token i."""
    source = Lut2Source(V, 2, slot_bits=slot_bits)
    source.observe_pairs(np.array(pairs, np.int64).reshape(-1, 2), top(*range(len(pairs))))
    return source


def held(source: Lut2Source, pair: tuple[int, int]) -> list[int]:
    return [token for token, _ in source.next_tokens(pair)]


@settings(deadline=None)
@given(pair_lists, st.sampled_from([2, 4, 16]))
def test_what_is_found_is_what_was_last_taught_for_the_very_pair(pairs, slot_bits):
    """Whatever shares a slot: another pair's row is never given out."""
    source = taught(*pairs, slot_bits=slot_bits)
    truth = {pair: [i, i + 1] for i, pair in enumerate(pairs) if pair[0] >= 0}
    found = {pair: held(source, pair) for pair in truth}
    assert all(found[pair] in ([], truth[pair]) for pair in truth)
    if pairs and pairs[-1][0] >= 0:
        assert found[pairs[-1]] == truth[pairs[-1]]
    if slot_bits == 16:
        missing = sum(not tokens for tokens in found.values())
        assert missing <= 1  # 40 pairs hardly ever meet in so many slots


def test_a_collision_is_a_miss_and_the_newer_pair_stays():
    source = taught((1, 2), (3, 4), slot_bits=0)
    assert held(source, (1, 2)) == []
    assert held(source, (3, 4)) == [1, 2]


def test_candidates_lead_on_to_their_own_pair():
    source = taught((1, 2), (2, 0))
    cursor = source.open([9, 1, 2], learns=True)
    first = candidates_of(cursor, cursor.root())[0]
    assert (first.token, first.state, first.evidence.source) == (0, (2, 0), "lut2")
    assert [c.token for c in candidates_of(cursor, first.state)] == [1, 2]
    assert cursor.follow(cursor.root(), 7) == (2, 7)


def test_a_text_shorter_than_a_pair_has_nothing():
    for prompt in ([], [4]):
        cursor = taught((1, 2)).open(prompt, learns=True)
        assert cursor.root() is None
        assert candidates_of(cursor, cursor.root()) == []
        assert cursor.follow(None, 3) is None


def step(learned: bool = True) -> StepRecord:
    """::

    1 ── 2 ── 3        path 1-2, then 9 of the model's own
    └─── 4 ── 2
    """
    tree = DraftTree.of_root(1)
    tree.add(tree.add(0, 2, 0.5), 3, 0.4)
    tree.add(tree.add(0, 4, 0.3), 2, 0.2)
    rows = top(*(10 + node for node in range(len(tree)))) if learned else None
    return StepRecord(row=0, tree=tree, path=[0, 1], committed_ids=[2, 9], top=rows)


def test_every_node_teaches_its_pair_and_the_cursor_moves_on():
    source = Lut2Source(V, 2)
    cursor = source.open([8, 1], learns=True)
    cursor.observe(step())
    for pair, first in {(8, 1): 10, (1, 2): 11, (2, 3): 12, (1, 4): 13, (4, 2): 14}.items():
        assert held(source, pair) == [first, first + 1]
    assert cursor.root() == (2, 9)


def test_a_step_of_one_token_moves_behind_the_root():
    cursor = Lut2Source(V, 2).open([8], learns=True)
    record = StepRecord(row=0, tree=DraftTree.of_root(8), path=[0], committed_ids=[5], top=top(5))
    cursor.observe(record)
    assert cursor.root() == (8, 5)


def test_a_frozen_cursor_and_a_step_without_logits_teach_nothing():
    source = Lut2Source(V, 2)
    frozen, deaf = source.open([8, 1], learns=False), source.open([8, 1], learns=True)
    frozen.observe(step())
    deaf.observe(step(learned=False))
    assert source.arrays()["pairs"].size == 0
    assert frozen.root() == deaf.root() == (2, 9)


@settings(deadline=None)
@given(pair_lists)
def test_arrays_come_back_as_they_were(pairs):
    source, twin = taught(*pairs), Lut2Source(V, 2)
    twin.restore(source.arrays())
    first, second = source.arrays(), twin.arrays()
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    order = [tuple(pair) for pair in first["pairs"].tolist()]
    assert order == sorted(order)


def test_a_copy_is_independent_both_ways():
    source = taught((1, 2))
    twin = source.copy()
    twin.observe_pairs(np.array([[3, 4]]), top(7))
    source.observe_pairs(np.array([[5, 6]]), top(8))
    assert (held(source, (3, 4)), held(twin, (3, 4))) == ([], [7, 8])
    assert (held(source, (5, 6)), held(twin, (5, 6))) == ([8, 9], [])
    assert held(twin, (1, 2)) == held(source, (1, 2)) == [0, 1]


def test_memory_is_bounded_whatever_the_vocabulary():
    assert REGISTRY["lut2"](128_256, 8).nbytes == REGISTRY["lut2"](100, 8).nbytes <= 7.4e6


def test_tokens_beyond_the_vocabulary_make_no_pair():
    """They would share the key of another one."""
    source = Lut2Source(10, 1)
    top = TopK(np.array([[5], [6]], np.int32), np.ones((2, 1), np.float16))
    source.observe_pairs(np.array([[2, 14], [14, 2]]), top)
    assert [source.next_tokens(pair) for pair in ((2, 14), (3, 4), (14, 2))] == [[], [], []]
