"""Sums in float32, rounded to half precision just as stock's own come out.

Where a CPU can't calculate in half precision, torch adds up each token's product with each row of
weights by itself, in float32. Added up in another order, all tokens at once, a sum is off by some
of its last bits, and nearly always rounded to the same half. Where it may not be, since it lies
that near to where rounding turns, torch's own code is asked for that row of weights. There are so
few of them that it costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear

__all__ = ["Part", "counts_alone", "settle"]

_UNIT = 2.0**-24  # half of a float32's last bit
# how far two orders may lie apart: in parts of the sum, ten times as far as they usually do; and of
# the lengths of the two vectors that are multiplied, which matters for sums that cancel out
_OF_SUM = 32 * _UNIT
_OF_LENGTHS = 2 * _UNIT
_AT_ONCE = 8  # tokens: for more, most tokens need few of the rows that some token needs


class Part(NamedTuple):
    """Where some columns of a product come from."""

    weight: torch.Tensor  # (O, I)
    bias: torch.Tensor | None


def settle(
    sums: torch.Tensor,  # (N, columns), float32, without biases
    tokens: torch.Tensor,  # (N, I), half precision
    parts: Sequence[Part],
    lengths: torch.Tensor,  # (columns), float32: each one's row of weights as a vector
) -> torch.Tensor:
    """What `linear` gives for each part, one behind the other: (N, columns), half precision.

    `sums` are written over. Nothing is kept for gradients.
    """
    with torch.no_grad():
        outcome = tokens.new_empty(sums.shape)
        biases = _biases(parts, len(lengths))
        own_lengths = torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float32)
        for first in range(0, len(tokens), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            unsure = _round(sums[some], biases, own_lengths[some], lengths, into=outcome[some])
            _ask(tokens[some], parts, unsure, into=outcome[some])
    return outcome


def _round(
    sums: torch.Tensor,
    biases: torch.Tensor | None,
    own_lengths: torch.Tensor,
    lengths: torch.Tensor,
    *,
    into: torch.Tensor,
) -> NDArray[np.bool_]:
    """Rounds all; true where another order might have been rounded otherwise."""
    sizes = sums.abs()
    if biases is not None:
        sizes += sums.add_(biases).abs()
    slack = sizes.addr_(own_lengths, lengths, beta=_OF_SUM, alpha=_OF_LENGTHS)
    torch.sub(sums, slack, out=into)
    other = torch.add(sums, slack, out=torch.empty_like(into))
    return into.view(torch.int16).numpy() != other.view(torch.int16).numpy()  # type: ignore[no-any-return]


def _ask(
    tokens: torch.Tensor, parts: Sequence[Part], unsure: NDArray[np.bool_], *, into: torch.Tensor
) -> None:
    """Puts what torch's own code says into the columns of which one is unsure."""
    column = 0
    for weight, bias in parts:
        end = column + len(weight)
        rows = torch.from_numpy(unsure[:, column:end].any(0).nonzero()[0])
        if len(rows):
            own = None if bias is None else bias[rows]
            asked = linear(tokens, weight.index_select(0, rows), own)
            into[:, column:end].index_copy_(1, rows, asked)
        column = end


def _biases(parts: Sequence[Part], num_columns: int) -> torch.Tensor | None:
    """Of all columns, zeros where a part has none."""
    if all(part.bias is None for part in parts):
        return None
    biases = torch.zeros(num_columns, dtype=torch.float32, device="cpu")
    first = 0
    for weight, bias in parts:
        if bias is not None:
            biases[first : first + len(weight)] = bias
        first += len(weight)
    return biases


@cache
def counts_alone(dtype: torch.dtype) -> bool:
    """Does this CPU come to the same bits for a token, whatever else it is asked for with it?

    Tried with some numbers. That is so where it takes stock's slow way for half precision, one
    token and one row of weights after the other.
    """
    numbers = torch.Generator().manual_seed(0)
    tokens, weight = (
        torch.randn(size, 257, generator=numbers).to(dtype) for size in (_AT_ONCE, 96)
    )
    bias, some = weight[:, 0].contiguous(), torch.tensor([3, 40, 95])
    for own in (None, bias):
        whole = linear(tokens, weight, own)
        alone = torch.cat([linear(token[None], weight, own) for token in tokens])
        few = linear(tokens, weight[some], None if own is None else own[some])
        if not torch.equal(whole, alone) or not torch.equal(whole[:, some], few):
            return False
    return True
