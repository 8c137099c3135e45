"""What the KV costs in memory: stock's, and ours with its slots, at the same length of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.cache_utils import CacheLayerMixin

from selfspec import SelfSpec, attach
from selfspec.compat.generation import KV
from tests.fakes import new_model, of_library, prompt


def tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """All that a layer holds: keys, values and their slots."""
    for value in vars(layer).values():
        inner = value.values() if isinstance(value, dict) else [value]
        yield from (each for each in inner if isinstance(each, torch.Tensor))
        if isinstance(value, CacheLayerMixin):
            yield from tensors_of(value)


def most_held(model: Any, length: int, **options: Any) -> int:
    """The most bytes that the storages of the KV's layers have during a forward."""
    sizes = [0]

    def look(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        layers = getattr(kwargs.get(KV), "layers", ())
        storages = [each.untyped_storage() for layer in layers for each in tensors_of(layer)]
        sizes.append(sum({each.data_ptr(): each.nbytes() for each in storages}.values()))

    handle = model.register_forward_hook(of_library(look), with_kwargs=True)
    model.generate(**prompt(1, length), min_new_tokens=40, max_new_tokens=40, **options)
    handle.remove()
    return max(sizes)


@pytest.mark.parametrize("length", [20, 200])
def test_slots_take_a_tenth_more_and_those_of_a_tree(length: int) -> None:
    model, width = attach(new_model()), 16
    spec = SelfSpec(budget="fixed", max_nodes=width)
    with torch.no_grad():
        spec.support(model)  # A trial has a KV of its own.
        stock = most_held(model, length, do_sample=False)
        ours = most_held(model, length, do_sample=False, assistant=spec)
    config = model.config
    column = 2 * 4 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    assert stock == (length + 39) * column  # The last token's KV is never made.
    assert stock <= ours <= 1.1 * stock + width * column
