"""Preallocated KV slots, and the cache layers that write into them.

All layers of one attention type and one geometry share an arena, so that keeping a path costs
two copies an arena and not two a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

__all__ = ["Arena", "ArenaLayer", "Geometry", "Member"]

Member = tuple[int, str]  # a layer's index, and "keys" or "values"


class Geometry(NamedTuple):
    """What keys or values have in common that share an arena."""

    attention_type: str
    shape: tuple[int, int, int]  # (B, H, D)
    dtype: torch.dtype
    device: torch.device


@dataclass
class Arena:
    """Slots for the keys or values of several layers of one geometry."""

    geometry: Geometry
    slots: torch.Tensor  # (members, B, H, capacity, D)
    members: list[Member] = field(default_factory=list)

    @property
    def attention_type(self) -> str:
        """That of its layers."""
        return self.geometry.attention_type


class ArenaLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of its arenas; where it writes is its subclass's matter."""

    is_sliding = False
    is_croppable = False
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, attention_type: str) -> None:
        super().__init__()
        self.attention_type = attention_type
        self.is_initialized = True
        self.stores: dict[str, torch.Tensor] = {}  # "keys", "values" -> (B, H, capacity, D)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the arenas exist before the layer is used."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends behind the front and returns everything up to there, without copying it."""
        keys = self.keys = self._append("keys", key_states)
        values = self.values = self._append("values", value_states)
        return keys, values

    def get_max_length(self) -> int:
        """No maximum: arenas grow."""
        return -1

    def _append(self, name: str, states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
