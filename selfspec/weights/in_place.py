"""Which layers of a model that we load may hold their weight in a packed format alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from selfspec.weights.copies import linears_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def own_memory(model: PreTrainedModel) -> None:
    """Copies the weights that are never packed in place.

    As long as one weight is a view of a mapped file, the whole file may be in memory.
    """
    alone = {id(module.weight) for module in layers_alone(model)}
    for weight in model.parameters():
        if id(weight) not in alone and weight.device.type == "cpu":
            weight.data = weight.data.clone()


def layers_alone(model: PreTrainedModel, *, with_head: bool = True) -> set[nn.Linear]:
    """The layers whose weight no other module has, with the output head or without."""
    owners = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    head = None if with_head else model.get_output_embeddings()
    return {m for m in linears_of(model) if m is not head and owners[id(m.weight)] == 1}
