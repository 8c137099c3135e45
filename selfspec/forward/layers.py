"""The layers of a KV cache as a model sees them in forwards over drafts.

They hold nothing themselves: keys and values lie in the slots of a `TreeKV`, and running states
belong to `States`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from selfspec.compat.states import CONVOLUTION, states_by_place
from selfspec.forward.layout import TreePlacement
from selfspec.forward.states.slots import States


class Placed(Protocol):
    """What layers look at: where the trees of the next forward lie, and the running states."""

    forward: TreePlacement
    states: States


class KVLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer as the model sees it: writes a tree's keys and values where trees begin."""

    is_sliding = False
    is_croppable = False
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, kv: Placed, attention_type: str) -> None:
        super().__init__()
        # In a cycle of references, the KV of a call would outlive it until Python looks for cycles.
        self._kv: Placed = weakref.proxy(kv)
        self.attention_type = attention_type
        self.is_initialized = True
        self.stores: dict[str, torch.Tensor] = {}  # (B, H, capacity, D) for "keys" and "values"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing, since the slots exist before the layer is used."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes where trees begin and returns all slots up to there, without copying them."""
        forward, keys, values = self._kv.forward, self.stores["keys"], self.stores["values"]
        if forward.layout is not None:
            slots = forward.layout.slots[self.attention_type]
            keys.index_copy_(2, slots, key_states)
            values.index_copy_(2, slots, value_states)
            end = forward.layout.num_keys(self.attention_type)
        else:
            start = forward.tree_start - forward.firsts[self.attention_type]
            width = key_states.shape[-2]
            end = start + width
            # Unlike an assignment to a slice, this raises an error where the slots end too early.
            keys.narrow(2, start, width).copy_(key_states)
            values.narrow(2, start, width).copy_(value_states)
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def get_max_length(self) -> int:
        """-1, which means no maximum: slots are added when needed."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next forward sees, and the column of the first one."""
        forward = self._kv.forward
        if forward.layout is not None:
            return forward.layout.num_keys(self.attention_type), 0
        first_column = forward.firsts[self.attention_type]
        return forward.tree_start - first_column + query_length, first_column

    def get_seq_length(self) -> int | torch.Tensor:
        """How many columns are in front of the next tree; a tensor where a capture needs one."""
        forward = self._kv.forward
        return forward.tree_start if forward.layout is None else forward.layout.tree_start


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The states of one layer, as the model sees them in a forward over trees."""

    is_croppable = False
    is_compileable = False

    def __init__(self, states: States, index: int) -> None:
        super().__init__()
        self._states: States = weakref.proxy(states)
        self._index = index
        self.record_past = True  # So that a convolution of a single token asks for its columns.

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Does nothing, since the states exist before the layer is used."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """(B, C, size + W): the columns of the state, then those of the nodes."""
        return self._states.columns((self._index, CONVOLUTION, state_idx), conv_states)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Does nothing, since a path decides on the next state."""
        return recurrent_states


class KVAndStateLayer(StateLayer, KVLayer):
    """One layer that has attention beside running states."""

    def __init__(self, kv: Placed, attention_type: str, index: int) -> None:
        KVLayer.__init__(self, kv, attention_type)
        StateLayer.__init__(self, kv.states, index)


def layers_for(
    attention_types: Sequence[str | None], with_states: Collection[int], kv: Placed
) -> list[Any]:
    """A layer for each attention type; those with running states are also layers of `kv.states`."""
    layers: list[Any] = []
    for index, name in enumerate(attention_types):
        if index not in with_states:
            layers.append(KVLayer(kv, str(name)))
            continue
        layer = StateLayer(kv.states, index) if name is None else KVAndStateLayer(kv, name, index)
        kv.states.layers[index] = layer
        layers.append(layer)
    return layers


def take_over(layers: Sequence[Any], states: States) -> None:
    """Lets transformers' layers show the states of their rows, and write nothing to them."""
    of_layers = states_by_place(layers)
    num_rows = max(map(len, of_layers.values()), default=0)
    states.add(layers, 0, num_rows)
    for index in {index for index, *_ in of_layers}:
        layer, stand_in = layers[index], StateLayer(states, index)
        states.layers[index] = layer
        layer.update_conv_state = stand_in.update_conv_state
        layer.update_recurrent_state = stand_in.update_recurrent_state
    states.show(slice(0, num_rows))
