"""`StaticKV` does what `TreeKV` does, on slots that stay where they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from selfspec.run.arena import Geometry
from selfspec.run.graphs.static_kv import Span, StaticArenas, StaticKV, length_bucket
from tests.run.test_tree_kv import LAYERS, TYPES, KvMachine, states, stock_cache, write

WIDEST = 8


def adopt(cache, arenas, *, window=4, num_rows=1, room=8, widest=WIDEST) -> StaticKV:
    sizes = {"full_attention": 0, "sliding_attention": window}
    return StaticKV(cache, TYPES, sizes, arenas, num_rows=num_rows, room=room, widest=widest)


def write_tree(kv: StaticKV, arenas: StaticArenas, stamps: list[list[int]]):
    """One forward's worth of keys and values, where the spans say; what attention gets to see."""
    width = len(stamps[0])
    kv.reserve(width)
    for name, num_keys in kv.num_keys(width).items():
        slots = kv.front - kv.first_columns[name] + torch.arange(width)
        arenas.spans[name] = Span(slots, torch.tensor(kv.front), num_keys)
    return [arenas.cache.update(*states(layer, stamps), layer) for layer in range(len(LAYERS))]


class StaticKvMachine(KvMachine):
    """The same orders of forwards, commits, dropped rows and releases, on one set of arenas."""

    @initialize(
        num_rows=st.integers(1, 3),
        prompt_length=st.integers(1, 9),
        window=st.integers(2, 6),
        room=st.integers(0, 80),
    )
    def prompt(self, num_rows, prompt_length, window, room):
        self.arenas = StaticArenas(TYPES)
        super().prompt(num_rows, prompt_length, window, room, small_arena=0)

    def adopt(self) -> StaticKV:
        return adopt(
            self.cache, self.arenas, window=self.window, num_rows=len(self.rows), room=self.room
        )

    def write_tree(self, stamps):
        return write_tree(self.kv, self.arenas, stamps)

    def is_so_long(self, got, num_columns):
        bucket = length_bucket(num_columns)
        return num_columns <= got.shape[2] <= bucket and got.shape[2] % 64 == 0

    def check_sizes(self):
        assert self.arenas.num_rows >= len(self.rows)


TestStaticKv = StaticKvMachine.TestCase
TestStaticKv.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def filled(num_rows: int = 1, length: int = 5, window: int = 4):
    """A stock cache behind a prompt."""
    cache = stock_cache(window)
    write(cache, [list(range(1, length + 1))] * num_rows)
    return cache


def chain_steps(kv: StaticKV, arenas: StaticArenas, num_steps: int, width: int = WIDEST) -> None:
    for _ in range(num_steps):
        write_tree(kv, arenas, [[7] * width] * len(kv.lengths))
        kv.commit([list(range(width))] * len(kv.lengths))


def test_slots_stay_from_call_to_call():
    arenas = StaticArenas(TYPES)
    addresses = set()
    for num_rows, length in ((2, 30), (1, 9), (2, 40)):
        kv = adopt(filled(num_rows, length), arenas, num_rows=num_rows)
        addresses.add(tuple(layer.stores["keys"].data_ptr() for layer in arenas.layers))
        assert all(len(layer.stores["keys"]) == 2 for layer in arenas.layers)
        kv.release()
    assert len(addresses) == 1


def test_a_longer_text_or_more_rows_need_new_slots():
    arenas = StaticArenas(TYPES)
    generations = []
    for num_rows, length in ((1, 30), (1, 100), (1, 30), (3, 30), (2, 90)):
        adopt(filled(num_rows, length), arenas, num_rows=num_rows).release()
        generations.append(arenas.generation)
    assert generations[0] < generations[1] == generations[2] < generations[3]
    assert generations[3] == generations[4]  # rows for the one, columns for the other


def test_no_call_finds_what_another_left():
    """A hidden slot weighs 0, and 0 times a NaN would be a NaN."""
    arenas = StaticArenas(TYPES)
    kv = adopt(filled(), arenas)
    for layer in arenas.layers:
        layer.stores["values"].fill_(torch.nan)
    kv.release()
    adopt(filled(), arenas)
    assert not any(layer.stores["values"].isnan().any() for layer in arenas.layers)


def test_what_is_handed_back_is_no_slot():
    arenas = StaticArenas(TYPES)
    cache = filled()
    kv = adopt(cache, arenas)
    slots = {layer.stores["keys"].untyped_storage().data_ptr() for layer in arenas.layers}
    kv.release()
    assert not slots & {layer.keys.untyped_storage().data_ptr() for layer in cache.layers}
    assert all(not layer.stores and layer.keys is None for layer in arenas.layers)


def test_windowed_slots_forget_in_place_and_full_ones_are_made_anew():
    arenas = StaticArenas(TYPES)
    kv = adopt(filled(), arenas, room=100)
    sliding = [layer for layer in arenas.layers if layer.attention_type == "sliding_attention"]
    before = [layer.stores["keys"].data_ptr() for layer in sliding]
    generation = arenas.generation
    chain_steps(kv, arenas, 12)
    assert arenas.generation == generation
    chain_steps(kv, arenas, 40)
    assert arenas.generation > generation
    assert [layer.stores["keys"].data_ptr() for layer in sliding] == before
    assert sliding[0].stores["keys"].shape[2] == 64


@pytest.mark.parametrize(
    ("front", "width", "num_keys"), [(5, 8, 256), (248, 8, 256), (249, 8, 320), (300, 4, 320)]
)
def test_lengths_come_in_buckets_up_to_what_there_is(front, width, num_keys):
    arenas = StaticArenas(TYPES)
    kv = adopt(filled(length=front), arenas, room=320 - front)
    assert kv.num_keys(width) == {"full_attention": num_keys, "sliding_attention": 64}


def test_running_out_of_memory_leaves_the_cache_whole(monkeypatch):
    cache = filled()
    before = [layer.keys.clone() for layer in cache.layers]

    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr("selfspec.run.graphs.static_kv.torch.zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        adopt(cache, StaticArenas(TYPES))
    assert all(torch.equal(a, b.keys) for a, b in zip(before, cache.layers, strict=True))


def test_sizes_for_both_calls_unless_that_is_dear():
    arenas = StaticArenas(["full_attention"])
    kind = "full_attention", torch.float32, torch.device("cpu")

    def take(rows: int, capacity: int) -> tuple[int, ...]:
        slots = arenas.take(Geometry(kind[0], (rows, 2, 3), *kind[1:]), 1, capacity)
        return slots.shape[1], slots.shape[3]

    assert take(1, 640) == (1, 640)
    assert take(2, 512) == (2, 640)
    assert take(64, 64) == (64, 64)
    assert take(1, 64) == (64, 64)


def test_slots_made_in_inference_mode_can_be_written_outside_of_it():
    arenas = StaticArenas(TYPES)
    with torch.inference_mode():
        adopt(filled(), arenas).release()
    kv = adopt(filled(), arenas)
    chain_steps(kv, arenas, 2)
    assert kv.front == 5 + 2 * WIDEST
