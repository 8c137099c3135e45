"""Amounts of memory, and which layers they leave to be streamed."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selfspec import ConfigError, load
from selfspec.compat.generation import kv_of
from selfspec.weights.streamed.memory_plan import (
    NUM_BUFFERS,
    Sizes,
    choose_streamed,
    copy_pays,
    draft_model_bytes,
    forward_bytes,
    kv_bytes,
)
from tests.fakes import new_model, prompt


def sizes(number: int, *, fixed: int = 100) -> Sizes:
    return Sizes(fixed, [10] * number, [12] * number, 3)


@given(st.integers(4, 40), st.integers(0, 400))
def test_as_few_as_the_budget_allows(number, more):
    parts = sizes(number)
    max_bytes = 100 + 24 + 3 + more
    streamed = choose_streamed(parts, range(number), max_bytes)
    assert parts.with_streamed(streamed) <= max_bytes
    if len(streamed) > NUM_BUFFERS + 1:
        assert parts.with_streamed(streamed[1:]) > max_bytes
    gaps = [b - a for a, b in pairwise(streamed)]
    assert max(gaps, default=1) - min(gaps, default=1) <= 1


def test_too_little_names_the_least_that_will_do():
    with pytest.raises(ConfigError, match="126 bytes"):
        choose_streamed(sizes(8), range(8), 126)
    assert choose_streamed(sizes(8), range(8), 127) == tuple(range(8))


@pytest.mark.parametrize(
    ("megabytes", "share", "pays"),
    [(800, 0.31, True), (1200, 0.31, True), (1440, 0.5, False), (2000, 0.5, False)],
)
def test_a_rounded_copy_takes_the_place_of_layers_that_would_be_read(megabytes, share, pays):
    """Thirty layers of a model of a billion weights in bfloat16, whose copy has so many bytes."""
    layers = [65] * 30
    parts = Sizes(240, layers, layers, 8, rounded=[65 * share] * 30, rounded_head=100)
    if megabytes == 800:  # There is no room for it and two buffers.
        with pytest.raises(ConfigError, match="must be at least"):
            copy_pays(parts, range(30), megabytes)
    else:
        assert copy_pays(parts, range(30), megabytes) == pays
    assert copy_pays(parts, range(30), 4000)  # All of it has room.
    assert not copy_pays(parts, range(30), 2190)  # The model has, without it.


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek-v3", "glm4", "gpt2", "mixtral"])
def test_the_kv_is_what_a_forward_leaves(name):
    model, inputs = new_model(name), prompt(length=10)
    cache = kv_of(model(**inputs, use_cache=True))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_bytes(model, 10) == held


class Held(TorchDispatchMode):
    """The bytes of storages that were made inside and are still there, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()  # Addresses; one may be another storage's next.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see((args, kwargs), is_new=False)
        outcome = func(*args, **(kwargs or {}))
        self.see(outcome, is_new=True)
        return outcome

    def see(self, value: Any, *, is_new: bool) -> None:
        tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
        for storage in (tensor.untyped_storage() for tensor in tensors):
            address, num_bytes = storage._cdata, storage.nbytes() * is_new
            if address not in self._known:
                self._known.add(address)
                self.now += num_bytes
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.drop, address, num_bytes).atexit = False

    def drop(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.now -= num_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_a_forward_holds_no_more_than_was_reckoned(name):
    model, inputs = new_model(name), prompt(length=100)
    with Held() as held, torch.no_grad():
        model(**inputs, use_cache=False, logits_to_keep=1)
    assert held.most <= forward_bytes(model, 100) <= 3 * held.most


@pytest.mark.parametrize("max_memory", ["60%", "90%"])
def test_a_draft_model_is_part_of_the_budget(tmp_path, max_memory):
    """What it takes is missing for layers: so many fewer are resident."""
    model, small = new_model("llama", num_hidden_layers=40), new_model("llama")
    model.save_pretrained(tmp_path)
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    options = {"max_memory": max_memory, "max_length": 1}
    alone = load(str(tmp_path), **options)
    beside = load(str(tmp_path), draft_model=small, **options)
    more = num_streamed(beside) - num_streamed(alone)
    assert more == pytest.approx(draft_model_bytes(small, 1) / layer, abs=1)


def num_streamed(model: Any) -> int:
    return list(model.hf_device_map.values()).count("disk")
