"""Packing in place: a layer of a model that we load holds its weight in a packed format alone."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import nn

from selfspec.weights.copies import linears_of
from selfspec.weights.formats import PackedMatrix
from selfspec.weights.held_weight import PackedWeight, is_packed_in_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("selfspec")


class InPlacePacking:
    """Which layers of one model are packed in place, and which may be.

    None may be in a model that others have loaded (`is_over`). With `kept`, a message, packed
    weights are never given back, and code that writes to one gets the message as an error. With
    `copies`, layers that can't be packed in place get copies beside their weights. Once a weight
    was given back, no layer is packed in place any more.
    """

    def __init__(
        self, kept: str | None = None, *, copies: bool = True, is_over: bool = False
    ) -> None:
        self.copies = copies
        self._kept = kept
        self._packed: WeakSet[nn.Module] = WeakSet()
        self._free: set[nn.Linear] = set()
        self._is_over = is_over

    @property
    def is_used(self) -> bool:
        return bool(self._packed)

    def renew(self, model: PreTrainedModel, layers: Iterable[nn.Linear]) -> None:
        if not self._is_over and not all(map(is_packed_in_place, self._packed)):
            _log.warning("other code read weights that were packed, so they were given back")
            self._is_over = True
        self._packed = WeakSet(filter(is_packed_in_place, layers))
        self._free = set() if self._is_over else _alone(model, is_kept=self._kept is not None)

    def may_take(self, module: nn.Linear) -> bool:
        return module in self._free

    def take(self, module: nn.Linear, matrix: PackedMatrix | None) -> bool:
        """Packs a layer in place, if its weight comes back bit by bit; returns whether it does."""
        if matrix is None or not torch.equal(matrix.unpacked(), module.weight):
            return False
        module.weight = PackedWeight.of(module.weight, matrix, self._kept)
        self._packed.add(module)
        return True


def own_memory(model: PreTrainedModel) -> None:
    """Copies the weights that are never packed in place.

    As long as one weight is a view of a mapped file, the whole file may be in memory.
    """
    alone = {id(module.weight) for module in _alone(model, is_kept=False)}
    for weight in model.parameters():
        if id(weight) not in alone and weight.device.type == "cpu":
            weight.data = weight.data.clone()


def _alone(model: PreTrainedModel, *, is_kept: bool) -> set[nn.Linear]:
    """The layers whose weight no other module has.

    If packed weights are kept, the output head is left out, since code that reads its rows could
    not make it an ordinary weight again.
    """
    owners = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    head = model.get_output_embeddings() if is_kept else None
    return {m for m in linears_of(model) if m is not head and owners[id(m.weight)] == 1}
