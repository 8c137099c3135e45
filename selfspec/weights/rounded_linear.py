"""Linear layers with weights in 8 or 4 bits, and what they take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from selfspec.weights.rounded import GROUP, round_weight

_FEW = 32  # A layer with fewer inputs or outputs, such as that of an adapter, is not worth it.
_COLUMNS, _ROWS = 16, 64  # Multiples of columns in 8 bits, and of rows in 4 bits.


class RoundedLinear(nn.Module):
    """A linear layer whose weight can be rounded to 8 bits, or to 4."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> None:
        super().__init__()
        matrix = round_weight(weight, bits)
        assert matrix is not None
        self.num_bytes = matrix.numbers.nbytes + matrix.scales.nbytes
        self._matrix, self._bias = matrix, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(x, self._bias)


def can_be_rounded(module: Any) -> bool:
    """Is it a linear layer of a shape that torch multiplies in 8 bits?"""
    if type(module) is not nn.Linear or module.in_features % _COLUMNS:
        return False
    return min(module.in_features, module.out_features) >= _FEW


def rounded_bytes(layer: Any, name: str) -> int:
    """What a linear layer takes in ``"int4"`` or ``"int8"``."""
    num_rows, num_columns = layer.out_features, layer.in_features
    if name == "int4" and not (num_rows % _ROWS or num_columns % GROUP):
        return int(num_rows * num_columns // 2 + num_rows * num_columns // GROUP * 4)
    return int(num_rows * num_columns + 2 * num_rows)


def bytes_of_rounded(layer: nn.Module, name: str) -> int:
    """What a layer takes whose linear parts are rounded."""
    return sum(
        rounded_bytes(part, name)
        if can_be_rounded(part)
        else sum(weight.nbytes for weight in part.parameters(recurse=False))
        for part in layer.modules()
    )
