"""Second copies of a model's weights, laid out as this CPU's math library wants them.

Made on first use, and as large as the weights, or twice as large where a CPU can't calculate in
their half precision. One set serves all who use a model, for as long as one of them lives. Weights
may change between two calls in ways that torch counts nowhere, as adapters do when they are merged:
so each call sums all of them up, row by row, which takes a fraction of a forward's time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import psutil
import torch
from torch import nn

from selfspec.packed import Copy, Group, pack, packed_bytes

__all__ = ["Packs"]

_SHARE = 0.25  # of the memory that is free, which copies nobody asked for may take
_CGROUP = Path("/sys/fs/cgroup")


class _Held(NamedTuple):
    addresses: tuple[int, ...]
    dtype: torch.dtype
    sums: torch.Tensor  # of the rows' bits: they tell whether the weights are still the same
    copy: Copy


class Packs:
    """One model's copies. Safe to use from several threads."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[nn.Linear, _Held] = WeakKeyDictionary()  # by a group's first
        self._lock = threading.Lock()

    @classmethod
    def of(cls, model: nn.Module) -> Packs:
        """Those that somebody uses already, or new ones."""
        with _lock:
            known = _shared.get(model)
            packs = known() if known is not None else None
            if packs is None:
                packs = cls()
                _shared[model] = ref(packs)
            return packs

    def fit(self, groups: Iterable[Group]) -> bool:
        """May those that are missing be made, for the memory that they take?"""
        missing = sum(packed_bytes(group) for group in groups if group[0] not in self._held)
        return not missing or missing <= _SHARE * _free_memory()

    def copies(self, groups: Iterable[Group]) -> dict[Group, Copy]:
        """Of each group's weights as they are now."""
        with self._lock, torch.no_grad():
            return {group: self._fresh(group) for group in groups}

    def _fresh(self, group: Group) -> Copy:
        weights, held = [module.weight.detach() for module in group], self._held.get(group[0])
        place = tuple(weight.data_ptr() for weight in weights), weights[0].dtype
        sums = torch.cat([_row_sums(weight) for weight in weights])
        if held is None or held[:2] != place or not torch.equal(held.sums, sums):
            held = self._held[group[0]] = _Held(*place, sums, pack(weights))
        return held.copy


_lock = threading.Lock()
_shared: WeakKeyDictionary[nn.Module, ref[Packs]] = WeakKeyDictionary()


def _row_sums(weight: torch.Tensor) -> torch.Tensor:
    """Of the bits of each row, taken for whole numbers, the longest ones that it divides into."""
    num_bytes = weight.shape[1] * weight.element_size()
    words = torch.int64 if num_bytes % 8 == 0 else torch.int16 if num_bytes % 2 == 0 else torch.int8
    return weight.view(words).sum(-1)


def _free_memory() -> float:
    """Bytes that this machine, or the container that we are in, has to spare."""
    free = float(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        return min(free, float(limit) - float(used))
    except (OSError, ValueError):  # no container, or one without a limit
        return free
