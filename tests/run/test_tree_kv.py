"""`TreeKV` against plain lists of which token lies in which column."""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from selfspec.run.tree_kv import TreeKV, can_hold_trees, foreign_layer
from tests.strategies import paths_down, trees

# (attention type, heads, dim of K, dim of V): the first and third differ only in what V holds
LAYERS = (
    ("full_attention", 2, 3, 3),
    ("sliding_attention", 1, 4, 2),
    ("full_attention", 2, 3, 5),
    ("sliding_attention", 2, 2, 2),
)
TYPES = [layer[0] for layer in LAYERS]


def states(layer: int, stamps: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (B, H, L, D) that tell layer, head, dim and the token's stamp apart."""
    _, heads, key_dim, value_dim = LAYERS[layer]
    stamp = torch.tensor(stamps, dtype=torch.float64)[:, None, :, None] * 1000
    head = torch.arange(heads)[:, None, None] * 10
    key = stamp + layer * 100 + head + torch.arange(key_dim)
    return key, -(stamp + layer * 100 + head + torch.arange(value_dim))


def stock_cache(window: int) -> DynamicCache:
    """Empty, with layers of both kinds."""
    cache = DynamicCache()
    cache.layers = [
        DynamicSlidingWindowLayer(window) if name == "sliding_attention" else DynamicLayer()
        for name in TYPES
    ]
    return cache


def write(cache: DynamicCache, stamps: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One forward's worth of keys and values, and what each layer's attention gets to see."""
    return [cache.update(*states(layer, stamps), layer) for layer in range(len(LAYERS))]


def adopt(cache: DynamicCache, window: int, num_rows: int, room: int) -> TreeKV:
    sizes = {"full_attention": 0, "sliding_attention": window}
    return TreeKV(cache, TYPES, sizes, num_rows=num_rows, room=room)


class KvMachine(RuleBasedStateMachine):
    """Any order of forwards, commits, dropped rows and releases."""

    @initialize(
        num_rows=st.integers(1, 3),
        prompt_length=st.integers(1, 9),
        window=st.integers(2, 6),
        room=st.integers(0, 5),
        small_arena=st.sampled_from([1, 1 << 20]),
    )
    def prompt(self, num_rows, prompt_length, window, room, small_arena):
        self.window, self.room, self.small_arena, self.num_stamps = window, room, small_arena, 0
        self.rows = [self.new_stamps(prompt_length) for _ in range(num_rows)]  # the oracle
        self.cache = stock_cache(window)
        write(self.cache, self.rows)
        self.kv = self.adopt()

    def adopt(self) -> TreeKV:
        with mock.patch("selfspec.run.columns._SMALL_ARENA", self.small_arena):
            return adopt(self.cache, self.window, len(self.rows), self.room)

    def write_tree(self, stamps: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What attention gets to see of a forward."""
        self.kv.reserve(len(stamps[0]))
        return write(self.cache, stamps)

    def new_stamps(self, count: int) -> list[int]:
        """Each token that was ever written has a number of its own."""
        self.num_stamps += count
        return list(range(self.num_stamps - count + 1, self.num_stamps + 1))

    @rule(data=st.data())
    def forward_and_commit(self, data):
        grown = [data.draw(trees(max_nodes=6)) for _ in self.rows]
        width = max(map(len, grown))
        stamps = [self.new_stamps(width) for _ in self.rows]
        front = max(map(len, self.rows))
        seen = self.write_tree(stamps)
        self.check_seen(seen, stamps, front)
        paths = [data.draw(paths_down(tree)) for tree in grown]
        self.kv.commit(paths)
        for row, path, stamp in zip(self.rows, paths, stamps, strict=True):
            row.extend(stamp[node] for node in path)

    def check_seen(self, seen, stamps, front):
        """Attention gets the committed columns where they belong, and the tree behind the front."""
        for layer, held in enumerate(seen):
            first = self.kv.first_columns[TYPES[layer]]
            for row, committed in enumerate(self.rows):
                columns = [committed[first:], stamps[row]]
                starts = [0, front - first]
                for start, stamp in zip(starts, columns, strict=True):
                    for got, true in zip(held, states(layer, [stamp]), strict=True):
                        assert torch.equal(got[row, :, start : start + len(stamp)], true[0])
            assert all(self.is_so_long(got, front - first + len(stamps[0])) for got in held)

    def is_so_long(self, got: torch.Tensor, num_columns: int) -> bool:
        return got.shape[2] == num_columns

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def keep_rows(self, data):
        indices = range(len(self.rows))
        kept = sorted(data.draw(st.sets(st.sampled_from(indices), min_size=1)))
        self.kv.keep_rows(kept)
        self.rows = [self.rows[index] for index in kept]

    @rule()
    def release_and_adopt_again(self):
        self.check_release()
        # Stock decodes one more token, then drafting takes over again.
        stamps = [self.new_stamps(1) for _ in self.rows]
        write(self.cache, stamps)
        for row, stamp in zip(self.rows, stamps, strict=True):
            row.extend(stamp)
        self.kv = self.adopt()

    def check_release(self):
        """The stock layers hold what stock would hold, up to the shortest row."""
        self.kv.release()
        length = min(map(len, self.rows))
        self.rows = [row[:length] for row in self.rows]
        assert [type(layer) for layer in self.cache.layers] == [
            type(layer) for layer in stock_cache(self.window).layers
        ]
        as_stock = stock_cache(self.window)
        write(as_stock, self.rows)
        for got, true in zip(self.cache.layers, as_stock.layers, strict=True):
            assert torch.equal(got.keys, true.keys)
            assert torch.equal(got.values, true.values)
            assert got.get_seq_length() == true.get_seq_length() == length
            assert got.get_mask_sizes(3) == true.get_mask_sizes(3)

    @invariant()
    def lengths_and_sizes_are_right(self):
        if not hasattr(self, "kv"):
            return
        assert self.kv.lengths == [len(row) for row in self.rows]
        assert self.kv.front == max(self.kv.lengths)
        self.check_sizes()
        # Columns that a window still sees must never be dropped.
        dropped = self.kv.first_columns["sliding_attention"]
        assert dropped <= max(min(self.kv.lengths) - self.window + 1, 0)

    def check_sizes(self):
        """What a model may ask the cache for."""
        assert self.cache.get_seq_length() == self.kv.front
        for layer in self.cache.layers:
            first = self.kv.first_columns[layer.attention_type]
            assert layer.get_mask_sizes(4) == (self.kv.front - first + 4, first)

    def teardown(self):
        if hasattr(self, "kv"):
            self.check_release()


TestKv = KvMachine.TestCase
TestKv.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def chain_steps(kv: TreeKV, cache: DynamicCache, num_steps: int, width: int) -> None:
    """Each step accepts its whole chain."""
    for _ in range(num_steps):
        kv.reserve(width)
        write(cache, [[7] * width])
        kv.commit([list(range(width))])


def capacity(cache: DynamicCache, layer: int) -> int:
    return cache.layers[layer].stores["keys"].shape[2]


def test_full_arenas_double_and_windowed_ones_forget():
    cache = stock_cache(window=8)
    write(cache, [[1, 2, 3]])
    kv = adopt(cache, 8, num_rows=1, room=0)
    sizes = set()
    for _ in range(64):
        chain_steps(kv, cache, 1, width=4)
        sizes.add(capacity(cache, 0))
        assert capacity(cache, 1) <= 2 * (8 + 4)
    assert capacity(cache, 0) < 2 * kv.front + 4
    assert len(sizes) <= 9  # so often was it copied on the way from 3 to 259


def test_a_path_that_is_in_place_costs_no_copy(monkeypatch):
    cache = stock_cache(window=4)
    write(cache, [[1, 2]])
    kv = adopt(cache, 4, num_rows=1, room=8)
    monkeypatch.setattr("selfspec.run.columns.move_columns", lambda *_: pytest.fail("moved"))
    chain_steps(kv, cache, 2, width=3)


def test_a_single_write_fills_all_layers_of_a_geometry():
    """K of the first and third layer and V of the first share one arena of three members."""
    cache = stock_cache(window=4)
    write(cache, [[1, 2]])
    adopt(cache, 4, num_rows=1, room=8)
    storage = {
        cache.layers[i].stores[n].untyped_storage().data_ptr()
        for i, n in [(0, "keys"), (0, "values"), (2, "keys")]
    }
    assert len(storage) == 1


def test_much_memory_is_adopted_in_parts(monkeypatch):
    monkeypatch.setattr("selfspec.run.columns._SMALL_ARENA", 1)
    cache = stock_cache(window=4)
    write(cache, [[1, 2]])
    kv = adopt(cache, 4, num_rows=1, room=8)
    assert all(len(arena.members) == 1 for arena in kv._arenas)
    assert len(kv._arenas) == 2 * len(LAYERS)


def test_its_memory_ends_with_its_last_user():
    """Not only when Python looks for cycles: the next call's KV would come on top."""
    cache = stock_cache(window=4)
    write(cache, [[1, 2]])
    kv = adopt(cache, 4, num_rows=1, room=8)
    slots = weakref.ref(kv._arenas[0].slots)
    kv.release()
    del kv, cache
    assert slots() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("at", range(8))
def test_what_breaks_off_while_slots_are_filled_leaves_the_cache_whole(monkeypatch, at, error):
    cache, untouched = stock_cache(window=4), stock_cache(window=4)
    for each in (cache, untouched):
        write(each, [[1, 2, 3, 4, 5]])
    num_left = iter(range(at))

    class Interrupted(DynamicLayer):
        """Breaks off where its contents are taken away, key by key and value by value."""

        def __setattr__(self, name, value):
            if name in ("keys", "values") and not value.numel() and next(num_left, None) is None:
                raise error("on purpose")
            super().__setattr__(name, value)

    for layer in cache.layers:
        layer.__class__ = type("Interrupted", (Interrupted, type(layer)), {})
    with pytest.raises(error):
        adopt(cache, 4, num_rows=1, room=8)
    for ours, stock in zip(cache.layers, untouched.layers, strict=True):
        assert torch.equal(ours.keys, stock.keys)
        assert torch.equal(ours.values, stock.values)


@pytest.mark.parametrize("num_before", range(5))
def test_running_out_of_memory_in_a_step_leaves_what_was_committed(monkeypatch, num_before):
    """Some windowed arenas could have dropped columns, and others not."""
    cache, stock = stock_cache(window=3), stock_cache(window=3)
    for each in (cache, stock):
        write(each, [[1, 2, 3, 4, 5]])
    kv = adopt(cache, 3, num_rows=1, room=4)
    for stamp in range(6, 9):
        write(cache, [[stamp]])
        write(stock, [[stamp]])
        kv.commit([[0]])
    num_left, new_slots = iter(range(num_before)), kv._new_slots

    def scarce(*args):
        if next(num_left, None) is None:
            raise torch.OutOfMemoryError("on purpose")
        return new_slots(*args)

    monkeypatch.setattr(kv, "_new_slots", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        kv.reserve(9)
    kv.release()
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_an_interrupt_while_a_path_is_moved_commits_nothing(monkeypatch):
    cache, stock = stock_cache(window=9), stock_cache(window=9)
    for each in (cache, stock):
        write(each, [[1, 2]])
    kv = adopt(cache, 9, num_rows=1, room=8)
    write(cache, [[3, 4, 5]])

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("selfspec.run.columns.move_columns", broken)
    with pytest.raises(KeyboardInterrupt):
        kv.commit([[0, 2]])
    kv.release()
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)


def test_slots_that_are_too_few_are_an_error():
    """One column that is assigned to none would be lost in silence."""
    cache = stock_cache(window=9)
    write(cache, [[1, 2]])
    kv = adopt(cache, 9, num_rows=1, room=0)
    assert kv.front == 2
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        write(cache, [[3]])


@pytest.mark.parametrize("num_before", range(8))
def test_running_out_of_memory_on_the_way_leaves_the_cache_whole(monkeypatch, num_before):
    monkeypatch.setattr("selfspec.run.columns._SMALL_ARENA", 1)
    cache, untouched = stock_cache(window=4), stock_cache(window=4)
    for each in (cache, untouched):
        write(each, [[1, 2, 3, 4, 5]])
    new_slots = TreeKV._new_slots
    num_left = iter(range(num_before))

    def scarce(*args):
        if next(num_left, None) is None:
            raise torch.OutOfMemoryError("on purpose")
        return new_slots(*args)

    monkeypatch.setattr(TreeKV, "_new_slots", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        adopt(cache, 4, num_rows=1, room=8)
    for ours, stock in zip(cache.layers, untouched.layers, strict=True):
        assert torch.equal(ours.keys, stock.keys)
        assert torch.equal(ours.values, stock.values)
        assert ours.get_seq_length() == stock.get_seq_length() == 5


def test_adopting_frees_the_stock_tensors():
    cache = stock_cache(window=4)
    write(cache, [[1, 2, 3]])
    stock = list(cache.layers)
    adopt(cache, 4, num_rows=1, room=8)
    assert all(layer.keys.numel() == layer.values.numel() == 0 for layer in stock)


def test_fresh_slots_are_zero():
    """A hidden slot weighs 0, and 0 times a NaN would be a NaN."""
    cache = stock_cache(window=4)
    write(cache, [[1, 2, 3]])
    kv = adopt(cache, 4, num_rows=1, room=8)
    assert float(cache.layers[0].stores["values"][:, :, 3:].abs().sum()) == 0
    kv.reserve(40)
    assert float(cache.layers[0].stores["values"][:, :, 3:].abs().sum()) == 0


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (type("QuantizedLayer", (DynamicLayer,), {})(), "QuantizedLayer"),
        (SimpleNamespace(is_initialized=True), "SimpleNamespace"),
    ],
)
def test_layers_of_other_kinds_are_named(layer, name):
    cache = stock_cache(window=4)
    write(cache, [[1]])
    assert foreign_layer(cache) is None
    assert can_hold_trees(cache) is None
    layer.is_initialized = True
    cache.layers[1] = layer
    assert foreign_layer(cache) == f"a KV layer is a {name}, which can't branch"
    assert can_hold_trees(cache) == foreign_layer(cache)


def test_static_layers_and_empty_ones_cannot_hold_trees():
    static = StaticCache(LlamaConfig(num_hidden_layers=1), max_cache_len=8)
    assert "StaticLayer" in foreign_layer(static)
    assert can_hold_trees(stock_cache(4)) == (
        "a KV layer holds nothing, as where layers share their keys"
    )
