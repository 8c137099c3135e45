"""`linear` in half precision, to the bits of torch's own code for one token after the other."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear

from selfspec.native.kernel import HALVES, Kernel, compiled

__all__ = ["project", "projects"]

_FEATURES = 64  # whole vectors of torch's: what is left over goes through other code there
_LEAST_ROWS = 8
_TRIED = (64, 192, 640)


def projects(dtype: torch.dtype, in_features: int) -> bool:
    """Does `project` come to torch's own bits here, for weights of such rows?"""
    return dtype in HALVES and in_features % _FEATURES == 0 and _comes_out(dtype)


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` where `projects` says so, of contiguous weights. Nothing is kept for gradients."""
    num_rows, size = weight.shape
    is_ours = size % _FEATURES == 0 and num_rows >= _LEAST_ROWS and weight.dtype in HALVES
    is_plain = x.dtype is weight.dtype and x.shape[-1] == size
    kernel = _kernel(weight.dtype) if is_ours and is_plain else None
    if kernel is None or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)  # as stock converts or refuses it
    if not x.is_contiguous():
        x = x.contiguous()
    outcome = x.new_empty((*x.shape[:-1], num_rows))
    kernel(
        weight.data_ptr(),
        x.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        outcome.data_ptr(),
        num_rows,
        size,
        x.numel() // size,
    )
    return outcome


@cache
def _kernel(dtype: torch.dtype) -> Kernel | None:
    def code() -> object:
        from selfspec.native.projection_code import projection_code

        return projection_code(dtype)

    return compiled(code)


@cache
def _comes_out(dtype: torch.dtype) -> bool:
    """Tried with numbers that cancel out, so that little but the order of sums is left."""
    if _kernel(dtype) is None:
        return False
    numbers = torch.Generator("cpu").manual_seed(0)
    for size in _TRIED:
        tokens, weight = (
            torch.randn(rows, size, generator=numbers, dtype=torch.float32, device="cpu")
            for rows in (7, 48)
        )
        for mixed in (weight, torch.cat([weight, -weight], -1)):
            x = tokens if mixed is weight else torch.cat([tokens, tokens], -1)
            if not _are_equal(x.to(dtype), mixed.to(dtype)):
                return False
    return True


def _are_equal(tokens: torch.Tensor, weight: torch.Tensor) -> bool:
    """With and without a bias, each token alone."""
    for bias in (None, weight[:, 0].contiguous()):
        alone = torch.cat([linear(token[None], weight, bias) for token in tokens])
        if not torch.equal(project(tokens, weight, bias), alone):
            return False
    return True
