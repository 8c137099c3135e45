"""The running states of recurrent and hybrid models: in cache layers, and what moves them on.

A layer may hold states alone, or states and also keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from math import inf
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

StatePlace = tuple[int, str, int]  # A layer's index, the name of its states, and a number.
CONVOLUTION = "conv_states"
STATE_NAMES = (CONVOLUTION, "recurrent_states")  # The attributes of a layer that hold states.

# What each function does, by its name in the module that defines a layer. A name that is gone
# means that its models get chains in place of trees.
ROLES = {
    "causal_conv1d_fn": "convolution",
    "causal_conv1d_update": "convolution step",
    "chunk_kimi_delta_attention": "delta rule",
    "mamba2_chunk_scan": "scan",
    "mamba2_selective_state_update": "scan step",
    "recurrent_kimi_delta_attention": "delta rule",
    "torch_chunk_gated_delta_rule": "delta rule",
    "torch_recurrent_gated_delta_rule": "delta rule",
}

# In 5.17, Qwen4-Exp keeps the positions of all columns in the KV cache itself, whose own `crop`
# leaves them as they are. In 5.24 they are in its layers.
_POSITIONS = "position_ids"


def bounds_time_steps(modules: Iterable[nn.Module]) -> bool:
    """Do forwards over several tokens bound the time steps of states, while plain steps do not?

    The layers of Mamba 2 do so if they have limits. Few time steps may reach a limit, so a trial of
    a few tokens could miss it.
    """
    limits = (getattr(part, "time_step_limit", None) for part in modules)
    return any(limit is not None and tuple(limit) != (0.0, inf) for limit in limits)


def no_way_back(kv: Cache) -> str | None:
    """Why wrong drafts can't be taken back from a KV cache; None if they can.

    Each layer can be cropped, or holds states, which read no draft. Some models keep their states
    in their own modules, and none in the layers: these can't. A model's own kind of layer
    may hold more than an inherited `crop` knows of, while it inherits `is_croppable` too. So may
    the cache itself, if a forward has put a tensor there.
    """
    for name, value in vars(kv).items():
        if isinstance(value, torch.Tensor) and name != _POSITIONS:
            return f"its KV cache holds {name!r}, which crop() leaves as it is"
    for layer in kv.layers:
        layer_class = type(layer)
        if layer_class.__module__ != cache_utils.__name__ and "crop" not in vars(layer_class):
            name = layer_class.__name__
            return f"its KV layers are of type {name}, which has no crop() of its own"
        has_states = _has_states(layer) and any(layer.is_recurrent_states_initialized.values())
        if not layer.is_croppable and not has_states:
            return "its KV cache can't be cropped"
    return None


def keeps_nothing(layer: CacheLayerMixin) -> bool:
    """Does a layer of a cache stand for a layer of the model that has nothing to keep?

    It is there since 5.18. Without it, Nemotron-H is decoded plainly.
    """
    return type(layer) is getattr(cache_utils, "DummyLayer", None)


def keeps_only_states(kv: Cache) -> bool:
    """Do all layers of this cache hold running states alone, as those of a recurrent model do?

    Such a cache has no length. Before 5.24, such a model had no KV cache.
    """
    is_linear = getattr(kv, "is_linear", ())
    return bool(is_linear) and all(is_linear)


def columns_of(kv: Cache) -> int:
    """How many columns a KV cache holds; 0 for one that does not count them."""
    return 0 if keeps_only_states(kv) else int(kv.get_seq_length())


def states_by_place(layers: Sequence[Any]) -> dict[StatePlace, torch.Tensor]:
    """The running states of a cache's layers. Models write to these tensors in place."""
    return {
        (index, name, number): state
        for index, layer in enumerate(layers)
        if _has_states(layer)
        for name in STATE_NAMES
        for number, state in getattr(layer, name).items()
        if state is not None
    }


def put_states(layers: Sequence[Any], states: Mapping[StatePlace, torch.Tensor]) -> None:
    """Lets layers that have read nothing hold copies of these states, as if they had read a text.

    Without the marks of what is initialized, a model would begin with empty states.
    """
    for (index, name, number), state in states.items():
        layer = layers[index]
        LinearAttentionLayer.lazy_initialization(layer, **{name: state}, state_idx=number)
        getattr(layer, name)[number].copy_(state)
        layer.has_previous_state[number] = True


def has_states(layer: CacheLayerMixin) -> bool:
    """Does a layer hold running states, with or without all keys and values beside them?"""
    return _has_states(layer) and not _has_window(layer)


def record_past(kv: Cache) -> None:
    """Lets windowed layers keep the columns that leave their window, so that drafts can be cropped.

    In a layer with states beside a window, this is one switch for both.
    """
    for layer in kv.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def crop_to(kv: Cache, length: int) -> None:
    """Crops what forwards have added after the first `length` columns; states stay as they are.

    A forward that broke off has added columns to its first layers only, so all layers are asked.
    """
    for layer in kv.layers:
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            _undo_half_update(layer, length)
        if hasattr(layer, "get_seq_length"):
            attention = DynamicSlidingWindowLayer if _has_window(layer) else DynamicLayer
            crop = partial(attention.crop, layer) if _has_states(layer) else layer.crop
            crop(-max(layer.get_seq_length() - length, 0))
        _crop_indexer(layer, length)
    if (positions := getattr(kv, _POSITIONS, None)) is not None:
        setattr(kv, _POSITIONS, positions[..., :length])


def _undo_half_update(layer: DynamicLayer, length: int) -> None:
    """Takes back what a layer has done in a forward that broke off within it.

    Where memory ends, new keys may be there without new values, and a windowed layer has counted
    columns that it does not have.
    """
    num_columns = min(layer.keys.shape[-2], layer.values.shape[-2])
    layer.keys, layer.values = layer.keys[..., :num_columns, :], layer.values[..., :num_columns, :]
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.record_past:
        num_new = max(num_columns - min(length, layer.sliding_window - 1), 0)
        layer.cumulative_length = min(layer.cumulative_length, length + num_new)


def _crop_indexer(layer: CacheLayerMixin, length: int) -> None:
    """Crops the indexer's keys, which a layer keeps before it keeps and counts other columns."""
    keys = getattr(layer, "indexer_keys", None)
    if keys is not None and keys.numel():
        layer.indexer_keys = keys[:, :length]
    positions = getattr(layer, "indexer_position_ids", None)
    if positions is not None:
        layer.indexer_position_ids = positions[..., :length]


def stop_recording_past(kv: Cache) -> None:
    """Lets windowed layers drop old columns again; without it, they would keep all of them."""
    for layer in kv.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def _has_states(layer: CacheLayerMixin) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _has_window(layer: CacheLayerMixin) -> bool:
    return _has_states(layer) and isinstance(layer, DynamicSlidingWindowLayer)


def state_functions(modules: Iterable[nn.Module]) -> tuple[tuple[ModuleType, str], ...]:
    """The Python modules that define the layers of a model, with such functions in them."""
    names = dict.fromkeys(type(part).__module__ for part in modules)
    defining = [sys.modules[name] for name in names if name in sys.modules]
    return tuple((m, name) for m in defining for name in ROLES if callable(vars(m).get(name)))


def calls_state_functions(owner: type) -> bool:
    """Does a method of this class call such a function, so that its layers keep running states?"""
    methods = (unwrap(x) for x in vars(owner).values() if isinstance(x, FunctionType))
    names = (name for method in methods for name in method.__code__.co_names)
    return any(name in ROLES for name in names)
