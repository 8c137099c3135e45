"""Linear layers with weights in 8 or 4 bits, and what they take."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from selfspec.weights.rounded import bits_for, round_weight, stored_forms

_FEW = 32  # A layer with fewer inputs or outputs, such as that of an adapter, is not worth it.


class RoundedLinear(nn.Module):
    """A linear layer whose weight can be rounded to 8 bits, or to 4."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> None:
        super().__init__()
        matrix = round_weight(weight, bits)
        assert matrix is not None
        self.num_bytes = matrix.num_bytes
        self._matrix, self._bias = matrix, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(x, self._bias)


def can_be_rounded(module: Any) -> bool:
    """Is it a linear layer of a shape that torch multiplies in 8 bits?"""
    if type(module) is not nn.Linear or min(module.weight.shape) < _FEW:
        return False
    return bits_for(tuple(module.weight.shape), 8) is not None


def rounded_bytes(layer: Any, bits: int) -> int:
    """What a linear layer takes in 4 or 8 bits."""
    shape = tuple(layer.weight.shape)
    forms = stored_forms(shape, bits_for(shape, bits) or 8)
    return sum(prod(part) * dtype.itemsize for dtype, part in forms)


def bytes_of_rounded(layer: nn.Module, bits: int) -> int:
    """What a layer takes whose linear parts are rounded."""
    return sum(
        rounded_bytes(part, bits)
        if can_be_rounded(part)
        else sum(weight.nbytes for weight in part.parameters(recurse=False))
        for part in layer.modules()
    )
