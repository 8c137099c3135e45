"""Products of 8 bits on a CPU that has none: exact as those of VNNI are, and slow."""

from __future__ import annotations

import torch

from selfspec.weights import eight_bits, rounding

__all__ = ["imitate_products"]


def _packed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().double()


def _product(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, _zeros: torch.Tensor
) -> torch.Tensor:
    return (x.double() - 128).mm(packed).float().mul_(scale)


def _row_product(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.double().mm(rows.t().double()).int()


def imitate_products() -> None:
    """For the rest of the process, where the CPU has no such products of its own."""
    if eight_bits.missing_for_eight_bits() is not None:
        rounding.int8_packed = _packed
        rounding.int8_product, rounding.int8_row_product = _product, _row_product
        eight_bits.missing_for_eight_bits.cache_clear()
