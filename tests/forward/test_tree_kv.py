"""`TreeKV` against plain lists of which token lies in which column."""

import weakref
from collections.abc import Sequence
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

from selfspec.forward import sizes
from selfspec.forward import slots as module
from selfspec.forward.columns import KVRow
from selfspec.forward.inputs import can_hold_trees, foreign_layer
from selfspec.forward.layout import Layout, Window
from selfspec.forward.model import AttentionTypes
from selfspec.forward.sizes import ENDLESS, Policy, length_bucket
from selfspec.forward.tree_kv import TreeKV
from tests.strategies import paths_down, trees

EAGER, FIXED = Policy(), Policy(is_fixed=True)
# (attention type, heads, dim of K, dim of V): the first and third differ only in what V holds
LAYERS = (
    ("full_attention", 2, 3, 3),
    ("sliding_attention", 1, 4, 2),
    ("full_attention", 2, 3, 5),
    ("sliding_attention", 2, 2, 2),
)
TYPES = [layer[0] for layer in LAYERS]


@pytest.fixture(autouse=True, scope="module")
def few_more():
    """Slots are outgrown soon."""
    with mock.patch.object(sizes, "_MORE", 8):
        yield


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


def assert_same_cache(ours: DynamicCache, stock: DynamicCache) -> None:
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        assert isinstance(mine, type(theirs))
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.get_mask_sizes(3) == theirs.get_mask_sizes(3)


class HeldKV(TreeKV):
    """Makes the rows that it gets."""

    @property
    def lengths(self) -> list[int]:
        return [row.num_columns for row in self.rows]

    def admit(self, cache: DynamicCache, num_rows: int = 1, most: int = ENDLESS) -> None:
        new = [KVRow(cache.get_seq_length(), most) for _ in range(num_rows)]
        self.add(cache, new, self.rows)

    def keep(self, indices: Sequence[int]) -> None:
        self.keep_rows([self.rows[index] for index in indices])


def new_kv(window: int, policy: Policy = EAGER) -> HeldKV:
    windows = {"full_attention": Window(), "sliding_attention": Window("sliding", window)}
    return HeldKV(AttentionTypes(tuple(TYPES), windows, 0), policy)


def adopt(cache: DynamicCache, window: int, num_rows: int = 1, policy: Policy = EAGER) -> HeldKV:
    kv = new_kv(window, policy)
    kv.admit(cache, num_rows)
    return kv


def write_tree(kv: HeldKV, stamps: list[list[int]], *, captured: bool = False):
    """One forward's worth of a tree; what attention gets to see."""
    width = len(stamps[0])
    _, front, firsts, _ = kv.reserve(kv.rows, width)
    assert kv.cache.get_seq_length() == front == kv.tree_start
    for layer in kv.cache.layers:
        first_column = firsts[layer.attention_type]
        assert layer.get_mask_sizes(4) == (front - first_column + 4, first_column)
    if captured:
        first = {name: front - first_column for name, first_column in firsts.items()}
        slots = {name: first[name] + torch.arange(width) for name in first}
        masks = {name: torch.empty(1, 1, width, keys) for name, keys in kv.num_keys(width).items()}
        nothing = torch.empty(0)
        layout = Layout(nothing, nothing, masks, slots, torch.tensor(front), None)
        kv.forward = kv.forward._replace(layout=layout)
    return write(kv.cache, stamps)


class KvMachine(RuleBasedStateMachine):
    """Any order of forwards, commits, dropped rows and releases."""

    is_fixed = False

    @initialize(
        num_rows=st.integers(1, 3),
        prompt_length=st.integers(1, 9),
        window=st.integers(2, 6),
        least=st.sampled_from([0, 1, 5, 80]),
        small=st.sampled_from([1, 1 << 20]),
        multiple=st.sampled_from([1, 64]),
    )
    def prompt(self, num_rows, prompt_length, window, least, small, multiple):
        self.window, self.small, self.num_stamps, self.multiple = window, small, 0, multiple
        self.rows = [self.new_stamps(prompt_length) for _ in range(num_rows)]  # the oracle
        self.cache = stock_cache(window)
        write(self.cache, self.rows)
        self.least = least
        self.kv = new_kv(self.window, Policy(is_fixed=self.is_fixed))
        self.add()

    def add(self) -> None:
        with mock.patch.object(module, "_SMALL", self.small), self.small_steps():
            self.kv.admit(self.cache, len(self.rows))

    def small_steps(self):
        steps = {"_MULTIPLE": self.multiple, "_MORE": self.least, "_MORE_FIXED": self.least}
        return mock.patch.multiple(sizes, **steps)

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
        with self.small_steps():
            seen = write_tree(self.kv, stamps, captured=self.is_fixed)
        self.check_seen(seen, stamps, front)
        paths = [data.draw(paths_down(tree)) for tree in grown]
        self.kv.commit(paths)
        for row, path, stamp in zip(self.rows, paths, stamps, strict=True):
            row.extend(stamp[node] for node in path)

    def check_seen(self, seen, stamps, front):
        """Attention gets the committed columns where they belong, and the tree behind the front."""
        for layer, held in enumerate(seen):
            first = self.kv.forward.firsts[TYPES[layer]]
            for row, committed in enumerate(self.rows):
                columns = [committed[first:], stamps[row]]
                starts = [0, front - first]
                for start, stamp in zip(starts, columns, strict=True):
                    for got, true in zip(held, states(layer, [stamp]), strict=True):
                        assert torch.equal(got[row, :, start : start + len(stamp)], true[0])
            assert all(self.is_so_long(got, front - first + len(stamps[0])) for got in held)

    def is_so_long(self, got: torch.Tensor, num_columns: int) -> bool:
        if not self.is_fixed:
            return got.shape[2] == num_columns
        return num_columns <= got.shape[2] <= length_bucket(num_columns)

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def keep_rows(self, data):
        indices = range(len(self.rows))
        kept = sorted(data.draw(st.sets(st.sampled_from(indices), min_size=1)))
        self.kv.keep(kept)
        self.rows = [self.rows[index] for index in kept]

    @rule()
    def release_and_adopt_again(self):
        self.check_release()
        # Stock decodes one more token, then drafting takes over again.
        stamps = [self.new_stamps(1) for _ in self.rows]
        write(self.cache, stamps)
        for row, stamp in zip(self.rows, stamps, strict=True):
            row.extend(stamp)
        self.add()

    def check_release(self):
        """The stock layers hold what stock would hold, up to the shortest row."""
        self.kv.release()
        length = min(map(len, self.rows))
        self.rows = [row[:length] for row in self.rows]
        as_stock = stock_cache(self.window)
        write(as_stock, self.rows)
        assert_same_cache(self.cache, as_stock)
        assert self.cache.get_seq_length() == length

    @invariant()
    def lengths_and_sizes_are_right(self):
        if not hasattr(self, "kv"):
            return
        assert self.kv.lengths == [len(row) for row in self.rows]
        assert self.kv.tree_start == max(self.kv.lengths)
        # Columns that a window still sees must never be dropped.
        dropped = self.kv.forward.firsts.get("sliding_attention", 0)
        assert dropped <= max(min(self.kv.lengths) - self.window + 1, 0)

    def teardown(self):
        if hasattr(self, "kv"):
            self.check_release()


class KeptMachine(KvMachine):
    """The same on slots that outlive the calls, written where captured forwards say."""

    is_fixed = True


TestKv, TestKeptKv = KvMachine.TestCase, KeptMachine.TestCase
TestKv.settings = TestKeptKv.settings = settings(max_examples=40, stateful_step_count=15)


def chain_steps(kv: HeldKV, num_steps: int, width: int, **options) -> None:
    """Each step accepts its whole chain."""
    for _ in range(num_steps):
        write_tree(kv, [[7] * width] * len(kv.lengths), **options)
        kv.commit([list(range(width))] * len(kv.lengths))


def prompted(*stamps: int, num_rows: int = 1, window: int = 4) -> DynamicCache:
    """A stock cache behind a prompt."""
    cache = stock_cache(window)
    write(cache, [list(stamps)] * num_rows)
    return cache


def capacity(kv: HeldKV, layer: int) -> int:
    return kv.cache.layers[layer].stores["keys"].shape[2]


@pytest.mark.parametrize("policy", [EAGER, FIXED])
def test_full_slots_double_and_windowed_ones_forget(policy, monkeypatch):
    monkeypatch.setattr(sizes, "_MORE", 0)
    monkeypatch.setattr(sizes, "_MORE_FIXED", 0)
    kv = adopt(prompted(1, 2, 3, window=40), 40, 1, policy)
    capacities = set()
    for _ in range(300):
        chain_steps(kv, 1, width=4, captured=policy is FIXED)
        capacities.add(capacity(kv, 0))
        assert capacity(kv, 1) <= 128  # Two windows, rounded up to 64.
    assert capacity(kv, 0) < 2 * kv.tree_start + 64
    assert len(capacities) <= 8  # That is how often it was copied on the way from 3 to 1203.


def test_a_path_that_is_in_place_costs_no_copy(monkeypatch):
    kv = adopt(prompted(1, 2), 4)
    monkeypatch.setattr("selfspec.forward.tree_kv.move_columns", lambda *_: pytest.fail("moved"))
    chain_steps(kv, 2, width=3)


def test_its_memory_ends_with_its_last_user():
    """Not only when Python looks for cycles: the next call's KV would come on top."""
    cache = prompted(1, 2)
    kv = adopt(cache, 4)
    slots = weakref.ref(kv._parts[0].tensor)
    kv.release()
    del kv, cache
    assert slots() is None


@pytest.mark.parametrize("policy", [EAGER, FIXED])
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("at", range(8))
def test_what_breaks_off_while_slots_are_filled_leaves_the_cache_whole(at, error, policy):
    cache = prompted(1, 2, 3, 4, 5)
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
        adopt(cache, 4, 1, policy)
    assert_same_cache(cache, prompted(1, 2, 3, 4, 5))


def scarce(monkeypatch, num_before: int) -> None:
    """Memory runs out behind so many tensors of slots."""
    num_left, new_slots = iter(range(num_before)), module.new_slots

    def new(format, num_members, num_rows, capacity):
        if capacity and next(num_left, None) is None:
            raise torch.OutOfMemoryError("on purpose")
        return new_slots(format, num_members, num_rows, capacity)

    monkeypatch.setattr(module, "new_slots", new)


@pytest.mark.parametrize("num_before", range(5))
def test_running_out_of_memory_in_a_step_leaves_what_was_committed(monkeypatch, num_before):
    """Some windowed slots have dropped columns by then, and others not."""
    cache, stock = (prompted(1, 2, 3, 4, 5, window=3) for _ in range(2))
    kv = adopt(cache, 3, 1, EAGER)
    for stamp in range(6, 9):
        write_tree(kv, [[stamp]])
        write(stock, [[stamp]])
        kv.commit([[0]])
    scarce(monkeypatch, num_before)
    with pytest.raises(torch.OutOfMemoryError):
        kv.reserve(kv.rows, 30)
    kv.release()
    assert_same_cache(cache, stock)


def test_an_interrupt_while_a_path_is_moved_commits_nothing(monkeypatch):
    cache = prompted(1, 2, window=9)
    kv = adopt(cache, 9)
    write_tree(kv, [[3, 4, 5]])

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("selfspec.forward.tree_kv.move_columns", broken)
    with pytest.raises(KeyboardInterrupt):
        kv.commit([[0, 2]])
    kv.release()
    assert_same_cache(cache, prompted(1, 2, window=9))


# slots that outlive the calls


def test_sizes_suit_both_calls_unless_that_is_dear():
    """Slots get another address only if there are not enough of them."""
    kv, sizes, generations = new_kv(4, FIXED), [], []
    for num_rows, length in ((1, 640), (1, 100), (2, 512), (64, 64), (1, 64)):
        kv.admit(prompted(*range(length), num_rows=num_rows), num_rows, most=length)
        sizes.append(kv._parts[0].size[:2])
        generations.append(kv.generation)
        kv.release()
    assert sizes == [(1, 640), (1, 640), (2, 640), (64, 64), (64, 64)]
    first, second, third, fourth, fifth = generations
    assert first == second < third < fourth == fifth


def test_what_is_handed_back_is_no_slot():
    cache = prompted(1, 2)
    kv = adopt(cache, 4, 1, FIXED)
    kv.reserve(kv.rows, 1)
    slots = {layer.stores["keys"].untyped_storage().data_ptr() for layer in kv.cache.layers}
    kv.release()
    assert not slots & {layer.keys.untyped_storage().data_ptr() for layer in cache.layers}
    assert all(not layer.stores and layer.keys is None for layer in kv.cache.layers)


# caches that can't be taken over


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
    assert can_hold_trees(cache, ["full_attention"] * 4) is None
    assert "4 KV layers for 1, as where" in can_hold_trees(cache, ["full_attention"])
    layer.is_initialized = True
    cache.layers[1] = layer
    assert foreign_layer(cache) == f"a KV layer is a {name}, which can't branch"
    assert can_hold_trees(cache, ["full_attention"] * 4) == foreign_layer(cache)


def test_layers_of_different_lengths_cannot_hold_trees():
    cache = stock_cache(window=4)
    write(cache, [[1]])
    cache.layers[0].update(cache.layers[0].keys, cache.layers[0].values)
    assert "columns that are no tokens" in foreign_layer(cache)


def test_static_layers_and_empty_ones_cannot_hold_trees():
    static = StaticCache(LlamaConfig(num_hidden_layers=1), max_cache_len=8)
    assert "StaticLayer" in foreign_layer(static)
    assert can_hold_trees(stock_cache(4), ["full_attention"] * 4) == (
        "a KV layer holds nothing, as where layers share their keys"
    )


def test_a_row_moves_without_the_slots_that_are_empty():
    """But with all that a captured forward may see: a row that left may have left a NaN there."""
    cache = stock_cache(4)
    write(cache, [[1, 2, 3], [4, 5, 6]])
    kv = adopt(cache, 4, 2, EAGER)
    write_tree(kv, [[7] * 5, [8] * 5])
    for part in kv._parts:
        part.tensor[:, 0] = torch.nan
    kv.keep([1])
    for part in kv._parts:
        end = 3 + 5 - part.first
        assert torch.equal(part.tensor[:, 0, :, :end], part.tensor[:, 1, :, :end])
        assert part.tensor[:, 0, :, end:].isnan().all()
