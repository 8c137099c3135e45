"""Attention of single queries in half precision, to the bits of torch's own for each alone.

What order torch adds up in was found out, and nobody promises it; so `attends` tries it before
anything relies on it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from selfspec.native.kernel import HALVES, Kernel, compiled

__all__ = ["Lines", "attend", "attends"]

_EIGHT = 8  # numbers of a vector
_TRIED = (4, 7, 11, 23, 150, 303, 517)  # keys
_COUNTED = (1, 3, 8, 15, 16, 19, 27, 40, 147)  # keys, of which sums of exponentials are compared
_HEADS = 60  # for each of them
_LAST_BITS = 2e-7  # of a logarithm in float32


class Lines(NamedTuple):
    """The columns of the keys that each query sees, in line."""

    columns: NDArray[np.int32]  # (Q, longest); what is behind a line's end is never read
    lengths: NDArray[np.int32]  # (Q)

    @classmethod
    def of(cls, sees: NDArray[np.bool_]) -> Lines:
        """By the columns (Q, C) that each query sees."""
        lengths = sees.sum(1, dtype=np.int32)
        columns = np.zeros((len(sees), max(int(lengths.max()), 1)), dtype=np.int32)
        is_there = np.arange(columns.shape[1]) < lengths[:, None]
        columns[is_there] = sees.nonzero()[1]
        return cls(columns, lengths)


def attends(dtype: torch.dtype, dim: int) -> bool:
    """Does `attend` come to torch's own bits here, for heads of such a size?"""
    return dtype in HALVES and _comes_out(dtype, dim, torch.get_num_threads())


def attend(
    query: torch.Tensor,  # (heads, Q, D)
    key: torch.Tensor,  # (heads of keys, columns, D)
    value: torch.Tensor,
    lines: Lines,
    scale: float,
    totals: torch.Tensor | None = None,
) -> torch.Tensor:
    """The outcomes (Q, heads, D), where `attends` says so. Nothing is kept for gradients.

    `totals` (Q, heads), float32, are filled with the sums of exponentials, the highest being 1.
    """
    num_heads, num_queries, dim = query.shape
    kernel = _kernel(query.dtype, dim)
    assert kernel is not None
    query, key, value = (
        each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value)
    )
    outcome = torch.empty(num_queries, num_heads, dim, dtype=query.dtype, device="cpu")
    columns, lengths = lines
    kernel(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        columns.ctypes.data,
        lengths.ctypes.data,
        outcome.data_ptr(),
        num_queries,
        num_heads,
        num_heads // len(key),
        columns.shape[1],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        int(np.float32(scale).view(np.int32)),
        0 if totals is None else totals.data_ptr(),
    )
    return outcome


@cache
def _kernel(dtype: torch.dtype, dim: int) -> Kernel | None:
    def code() -> object:
        from selfspec.native.attention_code import attention_code

        return attention_code(dtype, dim)

    return compiled(code)


@cache
def _comes_out(dtype: torch.dtype, dim: int, _num_threads: int) -> bool:
    """With such numbers, too, as cancel out, so that nothing is left but the order of sums."""
    if dim % _EIGHT or _kernel(dtype, dim) is None:
        return False
    numbers = torch.Generator("cpu").manual_seed(0)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(*size, dim, generator=numbers, dtype=torch.float32, device="cpu")

    for length in _TRIED:
        query, key, value = 2 * some(2, 3), some(1, length), some(1, length)
        level = 40 * dim**-0.5 * (1 + some(2, 3)[..., :1] / 10).expand(-1, -1, dim)
        even = 1 + some(1, length) / 10
        several = torch.cat([value, -value], 1)
        for states in (
            (query, key, value),
            (query, torch.cat([key, key], 1), several),
            (level, torch.cat([even, even.roll(1, -1)], 1), several),  # equal scores, but for order
        ):
            if not _are_equal(*(each.to(dtype) for each in states)):
                return False
    return all(_totals_are_equal(dtype, dim, number) for number in _COUNTED)


def _totals_are_equal(dtype: torch.dtype, dim: int, num_keys: int) -> bool:
    """One key counts for 1, all others for little: the logarithm of the sum shows each bit."""
    numbers = torch.Generator("cpu").manual_seed(num_keys)
    key = torch.zeros(_HEADS, num_keys, dim, dtype=torch.float32, device="cpu")
    key[..., 0] = torch.empty_like(key[..., 0]).uniform_(-11, -7, generator=numbers)
    key[:, num_keys // 2, 0] = 0
    key = key.to(dtype)
    query = torch.zeros_like(key[:, :1])
    query[..., 0] = 1
    totals = torch.empty(1, _HEADS, dtype=torch.float32, device="cpu")
    attend(query, key, key, Lines.of(np.ones((1, num_keys), dtype=np.bool_)), 1.0, totals)
    try:
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    except AttributeError:
        return False
    expected = own(query[None], key[None], key[None], 0.0, False, scale=1.0)[1].flatten()
    found = totals.flatten().double().log()
    return torch.allclose(found, expected.double(), rtol=_LAST_BITS, atol=0)


def _are_equal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Asked of three queries that each have other keys."""
    sees = np.ones((3, key.shape[1]), dtype=np.bool_)
    sees[0, -2:] = sees[1, -1] = sees[2, -3:-1] = False
    found = attend(query, key, value, Lines.of(sees), query.shape[2] ** -0.5)
    return torch.equal(found, _alone(query, key, value, sees))


def _alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: NDArray[np.bool_]
) -> torch.Tensor:
    """What torch says to each query by itself, where there is one head of keys."""
    outcomes = []
    for number, row in enumerate(sees):
        seen = torch.from_numpy(row.nonzero()[0])
        one = query[None, :, number : number + 1]
        keys, values = (each[:, seen].expand(len(query), -1, -1)[None] for each in (key, value))
        outcomes.append(scaled_dot_product_attention(one, keys, values)[0])
    return torch.cat(outcomes, dim=1).transpose(0, 1)
