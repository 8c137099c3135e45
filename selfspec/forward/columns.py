"""Columns of keys and values, out of transformers' layers or slots and back into layers.

Knows rows, layers and columns; not what a text says, nor how long its columns are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from selfspec.compat.states import (
    StatePlace,
    has_states,
    keeps_nothing,
    keeps_only_states,
    put_states,
    states_by_place,
)
from selfspec.forward.sizes import ENDLESS
from selfspec.forward.slots import Member

# (1, H, N, D) for each member: its last N columns up to some column of a text. A windowed layer may
# have fewer than the others.
Columns = dict[Member, torch.Tensor]


@dataclass(eq=False)
class KVRow:
    """What a row knows of its keys and values, and where its next token is. A `Row` is one."""

    num_columns: int = 0  # that are committed
    max_columns: int = ENDLESS  # The most that it may need in the end.
    start: int = 0  # Columns before this are padding.
    position: NDArray[Any] = field(default_factory=lambda: np.zeros((), np.int64))  # (...,)
    place: int = 0  # The row of slots that belongs to it.
    # For each attention type, the first column that is left of the prompt in transformers' layers.
    first_columns: dict[str, int] = field(default_factory=dict)


class TextKV(NamedTuple):
    """What the KV of one text holds: columns, and running states after the last one."""

    columns: Columns
    states: Mapping[StatePlace, torch.Tensor] = {}


class Prefix(NamedTuple):
    """The KV of the first columns of a prompt, and the logits after it if that is all of it."""

    num_columns: int
    kv: TextKV
    logits: torch.Tensor | None  # (1, V)


def layers_reason(cache: Cache, num_layers: int) -> str | None:
    """Why nothing can be put into a prompt's KV cache; None if it can.

    The model has `num_layers`. Where some run again, keys and values depend on the forward.
    """
    is_known = type(cache) is DynamicCache and cache.layers and not keeps_only_states(cache)
    if not is_known or cache.get_seq_length():
        return "its KV cache is no empty DynamicCache that counts columns"
    if len(cache.layers) > num_layers:
        return f"it keeps {len(cache.layers)} KV layers for {num_layers}, as where some run again"
    for layer in cache.layers:
        is_known = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        if not (is_known or has_states(layer) or keeps_nothing(layer)):
            return f"its KV cache has a {type(layer).__name__}, which holds more than columns"
    return None


def first_needed(layer: CacheLayerMixin, length: int) -> int:
    """The first column that a layer of transformers' cache holds of a text of some length."""
    is_windowed = isinstance(layer, DynamicSlidingWindowLayer)
    return max(length - int(layer.sliding_window) + 1, 0) if is_windowed else 0


def text_kv_in(cache: Cache) -> TextKV:
    """What a cache of transformers holds of its one text."""
    columns = {
        (index, name): getattr(layer, name)
        for index, layer in enumerate(cache.layers)
        # Some layers share the keys of others, and some hold states alone.
        if getattr(layer, "keys", None) is not None
        for name in ("keys", "values")
    }
    return TextKV(columns, states_by_place(cache.layers))


def fill(cache: Cache, beginning: Prefix) -> None:
    """Lets an empty cache of transformers hold the beginning of a text, as if it had read it.

    Reading on makes new tensors of columns, and leaves these as they are. States are copied.
    """
    for (index, name), columns in beginning.kv.columns.items():
        layer = cache.layers[index]
        if not layer.is_initialized:
            layer.lazy_initialization(columns, columns)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = beginning.num_columns
        setattr(layer, name, columns)
    put_states(cache.layers, beginning.kv.states)
