"""Products of 8 bits as a CPU with VNNI has them, imitated where there is none."""

from __future__ import annotations

import torch

from selfspec.weights import eight_bits, rounding


def _packed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().double()


def _product(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, _zeros: torch.Tensor
) -> torch.Tensor:
    return (x.double() - 128).mm(packed).float().mul_(scale)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    return packed.t().to(torch.int8)


_IMITATED = {
    "int8_packed": _packed,
    "int8_unpacked": _unpacked,
    "int8_vnni_product": _product,
}


def imitate_products() -> None:
    """For the rest of the process, where torch has none for this CPU. They are exact, and slow."""
    if not eight_bits.has_products():
        for name, function in _IMITATED.items():
            setattr(rounding, name, function)
        eight_bits.has_products.cache_clear()
