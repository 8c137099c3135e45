"""Products of 8 bits: those of a CPU with VNNI, imitated where there is none, and the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from selfspec.weights import eight_bits, rounding

__all__ = ["KINDS", "imitate_products", "products_of"]

KINDS = ("bytes", "narrow")  # with VNNI and without


def _packed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().double()


def _product(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, _zeros: torch.Tensor
) -> torch.Tensor:
    return (x.double() - 128).mm(packed).float().mul_(scale)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    return packed.t().to(torch.int8)


def _row_product(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.double().mm(rows.t().double()).int()


def _missing(*arguments: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


_IMITATED = {
    "int8_packed": _packed,
    "int8_unpacked": _unpacked,
    "int8_vnni_product": _product,
    "int8_row_product": _row_product,
}


def imitate_products() -> None:
    """For the rest of the process, where torch has none for this CPU. They are exact, and slow."""
    if eight_bits.missing_for_eight_bits() is not None:
        for name, function in _IMITATED.items():
            setattr(rounding, name, function)


@contextmanager
def products_of(kind: str) -> Iterator[None]:
    """Weights in 8 bits get products of this kind meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        has_vnni = eight_bits.kernels() is rounding.BYTES
        eight_bits.kernels.cache_clear()
        if kind == "narrow":
            patch.setattr(rounding, "int8_vnni_product", _missing)
            if eight_bits.missing_for_eight_bits() is not None:
                pytest.skip("this build of torch has no FBGEMM")
        elif not has_vnni:
            for name, function in _IMITATED.items():
                patch.setattr(rounding, name, function)
        yield
    eight_bits.kernels.cache_clear()
