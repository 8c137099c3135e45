"""Linear layers whose weights are rounded to 8 bits by rows, or to 4 bits by groups of columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from selfspec.compat.kernels import (
    int4_group_product,
    int4_groups_packed,
    int8_row_scaled_product,
)

_GROUP = 32  # Columns that share a scale in 4 bits.
_ROWS = 32  # torch multiplies blocks of this many rows; the last block is filled up with zeros.
_FEW = 32  # A layer with fewer outputs, such as that of an adapter, is not worth it.
_AT_ONCE = 1 << 18  # So many numbers are rounded at a time: they stay in the processor's cache.


class RoundedLinear(nn.Module):
    """A linear layer with weights in 8 bits by rows, or in 4 bits by groups of 32 columns."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> None:
        super().__init__()
        self._num_rows, self._num_columns = weight.shape
        self._bias = bias
        rounded = _in_4_bits if bits == 4 else _in_8_bits
        self._product = int4_group_product if bits == 4 else int8_row_scaled_product
        weight = pad(weight, (0, 0, 0, -len(weight) % _ROWS))
        size = max(_AT_ONCE // self._num_columns, 1)
        parts = [rounded(rows.float()) for rows in torch.split(weight, size)]
        self._numbers, scales = (torch.cat(part) for part in zip(*parts, strict=True))
        if bits == 4:
            self._numbers = int4_groups_packed(self._numbers)
            scales = scales.transpose(0, 1)
        self._scales = scales.to(weight.dtype).contiguous()

    @property
    def num_bytes(self) -> int:
        return self._numbers.nbytes + self._scales.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self._num_columns)
        product = self._product(rows, self._numbers, self._scales)[:, : self._num_rows]
        if self._bias is not None:
            product = product + self._bias
        return product.reshape(*x.shape[:-1], -1)


def _in_8_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers (O, I) from -127 to 127, and the scale of each row."""
    scales = (rows.abs().amax(-1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (rows / scales[:, None]).round_().to(torch.int8), scales


def _in_4_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers (O, I) from 0 to 15; (O, I / 32, 2): the scale of each group, and its middle.

    A group's grid goes from its least weight to its largest, or is symmetric with the largest
    weight at its end, whichever is nearer to the weights.
    """
    groups = rows.view(len(rows), -1, _GROUP)
    least, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    farthest = torch.where(largest > -least, largest, least)
    even = (largest - least) / 15
    numbers, grid, off = _on_grid(groups, even, least + 8 * even)
    others, other_grid, other_off = _on_grid(groups, farthest / -8, torch.zeros_like(even))
    is_nearer = off <= other_off
    numbers = torch.where(is_nearer, numbers, others).view_as(rows)
    return numbers.to(torch.int32), torch.where(is_nearer, grid, other_grid)


def _on_grid(
    groups: torch.Tensor, step: torch.Tensor, middle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers of the nearest points of a grid, the grid, and how far off the points are."""
    step = torch.where(step == 0, 1.0, step)
    numbers = ((groups - middle) / step).round_().add_(8).clamp_(0, 15)
    off = ((numbers - 8) * step + middle - groups).square_().sum(-1, keepdim=True)
    return numbers, torch.cat([step, middle], -1), off


def can_be_rounded(module: Any) -> bool:
    """Is it a linear layer of a shape that torch multiplies in 4 and 8 bits?"""
    is_whole = type(module) is nn.Linear and not module.in_features % _GROUP
    return is_whole and module.out_features >= _FEW


def rounded_bytes(layer: Any, name: str) -> int:
    """What a linear layer takes in ``"int4"`` or ``"int8"``."""
    num_rows = layer.out_features + -layer.out_features % _ROWS
    num_numbers, size = num_rows * layer.in_features, layer.weight.dtype.itemsize
    if name == "int8":
        return int(num_numbers + num_rows * size)
    return int(num_numbers // 2 + num_numbers // _GROUP * 2 * size)


def bytes_of_rounded(layer: nn.Module, name: str) -> int:
    """What a layer takes whose linear parts are rounded."""
    return sum(
        rounded_bytes(part, name)
        if can_be_rounded(part)
        else sum(weight.nbytes for weight in part.parameters(recurse=False))
        for part in layer.modules()
    )
