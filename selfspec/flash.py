"""Attention of single queries in bfloat16 on a CPU, for many at once, to the bits of torch's own.

A CPU that can't calculate in half precision takes torch's slow code for a query that is alone, and
for queries that are asked together other code, which adds up in another order. Here the sums of
many queries are made in the order of one alone: in lanes that are folded, in blocks of keys, with
torch's own approximate exponential. What order that is was found out, and nobody promises it; so
`is_exact` tries it before anything relies on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Lines", "attend_lines", "is_exact", "lines_of"]

_FOUR = 4  # lanes that products are added up in
_EIGHT = 8  # numbers of a vector, as exponentials are worked out in
_SIXTEEN = 16  # lanes that exponentials are added up in
_BLOCK = 512  # keys that are done before the next ones
_FULL = 16  # columns of a product that all go through the same code
_AT_ONCE = 1 << 22  # numbers of a step that are held at once
_TRIED = (4, 7, 11, 23, 150, 303, 517)  # keys

_LOG2_E = 1.44269502162933349609375
_LEAST = -87.0  # the exponential of what is smaller counts for nothing
_POLYNOMIAL = tuple(
    torch.tensor(number, dtype=torch.float32, device="cpu")
    for number in (-0.0792042402, -0.224338365, 0.303542605, 0.000107034349)
)
_ONE_BIT = 2.0**23  # of the exponent of a float32, as an integer

_UNIT = 2.0**-24  # half of a float32's last bit
# how far two orders may lie apart: in parts of the sum, and of the lengths of the two vectors that
# are multiplied; several times what was seen
_OF_SUM = 8 * _UNIT
_OF_LENGTHS = 4 * _UNIT


class Lines:
    """The keys of each of some queries, as they stand in line.

    All see the first `num_shared` columns. Behind them each has some of its own; what is filled up
    is no key.
    """

    def __init__(self, num_shared: int, columns: torch.Tensor, lengths: torch.Tensor) -> None:
        places = torch.arange(columns.shape[1], device="cpu")
        self.num_shared = num_shared  # a multiple of sixteen
        self.columns = columns  # (Q, T), T a multiple of eight
        self.lengths = lengths  # (Q, 1), of each one's own
        self.is_filled_up = places >= lengths  # (Q, T)
        self.in_eights = places < lengths - lengths % _EIGHT
        self.in_fours = places < lengths - lengths % _FOUR

    def of(self, queries: slice) -> Lines:
        """Those of some of the queries."""
        return Lines(self.num_shared, self.columns[queries], self.lengths[queries])


def lines_of(sees: NDArray[np.bool_]) -> Lines | None:
    """By the columns (Q, C) that each query sees; None for such as can't be done together."""
    if not sees.any(1).all():
        return None
    by_all = sees.all(0)
    num_first = by_all.size if by_all.all() else int(by_all.argmin())
    num_shared = min(num_first, int(sees.sum(1).min()) - 1)  # each has one of its own
    num_shared -= num_shared % _SIXTEEN
    own = [row.nonzero()[0] + num_shared for row in sees[:, num_shared:]]
    longest = max(map(len, own))
    if num_shared % _BLOCK + longest > _BLOCK:  # some would end in the next block, others not
        return None
    columns = np.zeros((len(own), -(-longest // _EIGHT) * _EIGHT), dtype=np.int64)
    for row, line in zip(columns, own, strict=True):
        row[: len(line)] = line
    lengths = torch.tensor([[len(line)] for line in own], device="cpu")
    return Lines(num_shared, torch.from_numpy(columns), lengths)


def attend_lines(
    query: torch.Tensor,  # (heads, Q, D)
    key: torch.Tensor,  # (heads of keys, columns, D)
    value: torch.Tensor,
    lines: Lines,
    scale: float,
) -> torch.Tensor:
    """The outcomes (Q, heads, D), each as torch gives it for a query that is asked alone."""
    num_heads, num_queries, dim = query.shape
    queries = query.view(len(key), -1, num_queries, dim)
    keys, values = _by_lanes(key), _Values.taken_from(value, lines)
    size = max(_AT_ONCE // (_FOUR * num_heads * key.shape[1]), 1)
    if size >= num_queries:
        return _attend(queries, keys, values, lines, scale)
    parts = []
    for first in range(0, num_queries, size):
        some = slice(first, first + size)
        parts.append(_attend(queries[:, :, some], keys, values.of(some), lines.of(some), scale))
    return torch.cat(parts)


class _Values(NamedTuple):
    """Values in float32."""

    shared: torch.Tensor  # (G, columns that all see, D)
    own: torch.Tensor  # (G, Q, T, D)
    lengths: torch.Tensor  # (G, 1, 1, D): of the columns of numbers as vectors

    @classmethod
    def taken_from(cls, value: torch.Tensor, lines: Lines) -> _Values:
        """Out of all (G, columns, D)."""
        whole = value.float()
        own = whole[:, lines.columns.flatten()]
        return cls(
            whole[:, : lines.num_shared],
            own.view(len(whole), *lines.columns.shape, -1),
            whole.square().sum(1).sqrt_()[:, None, None],
        )

    def of(self, queries: slice) -> _Values:
        """Those of some of the queries."""
        return self._replace(own=self.own[:, queries])


class _Block(NamedTuple):
    """Some keys, done before the next ones."""

    first: int  # of the keys that all see
    last: int
    own: Lines | None  # in the last block
    weights: torch.Tensor  # (G, heads of one, Q, keys), rounded
    fades: torch.Tensor | None  # what the sums of the blocks before are multiplied with


def _attend(
    queries: torch.Tensor,  # (G, heads of one, Q, D)
    keys: torch.Tensor,  # (4 G, D / 4, columns), filled up
    values: _Values,
    lines: Lines,
    scale: float,
) -> torch.Tensor:
    """The outcomes (Q, heads, D)."""
    line = _in_line(_scores(queries, keys).mul_(scale), lines)
    end = lines.num_shared
    top = total = fades = None
    blocks = []
    for first in range(0, end + 1, _BLOCK):
        is_last = first + _BLOCK > end
        last, own = (end, lines) if is_last else (first + _BLOCK, None)
        scores = line[..., first:] if is_last else line[..., first:last]
        highest = scores.amax(-1, keepdim=True)
        if top is not None:
            highest = torch.maximum(highest, top)
            fades = _exact_exponentials(top - highest)
        exponentials = _exponentials(scores - highest, last - first, own)
        total = _faded(_sum(exponentials, last - first, own), total, fades)
        blocks.append(_Block(first, last, own, exponentials.bfloat16().float(), fades))
        top = highest
    assert total is not None
    return _weighed(blocks, values, total.reciprocal_()).flatten(0, 1).transpose(0, 1)


def _faded(
    sums: torch.Tensor, before: torch.Tensor | None, fades: torch.Tensor | None
) -> torch.Tensor:
    """With those of the blocks before, which fade."""
    if before is None or fades is None:
        return sums
    return torch.addcmul(sums, before, fades)


def _by_lanes(states: torch.Tensor) -> torch.Tensor:
    """(G, N, D) with every fourth number together: (4 G, D / 4, N), in float32.

    So, and with N filled up, torch's products add up one number after the other.
    """
    num_groups, num_rows, dim = states.shape
    apart = states.reshape(num_groups, num_rows, dim // _FOUR, _FOUR).permute(0, 3, 2, 1)
    whole = _filled_up(num_groups, _FOUR, dim // _FOUR, num_rows)
    whole[..., :num_rows] = apart
    return whole.flatten(0, 1)


def _filled_up(*shape: int) -> torch.Tensor:
    """Room for numbers of such a shape, filled up with zeros."""
    size = -(-shape[-1] // _FULL) * _FULL
    whole = torch.empty(*shape[:-1], size, dtype=torch.float32, device="cpu")
    whole[..., shape[-1] :] = 0
    return whole


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(G, heads of one, Q, columns), filled up."""
    num_groups, num_sharing, num_queries, dim = queries.shape
    apart = queries.reshape(num_groups, -1, dim // _FOUR, _FOUR).permute(0, 3, 1, 2)
    lanes = torch.bmm(apart.float().flatten(0, 1), keys)
    return _folded(lanes.view(num_groups, _FOUR, num_sharing, num_queries, -1), 1)


def _folded(lanes: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum of four, as a vector is folded."""
    first, second, third, fourth = lanes.unbind(dim)
    return (first + third).add_(second + fourth)


def _in_line(scores: torch.Tensor, lines: Lines) -> torch.Tensor:
    """(..., Q, columns) to (..., Q, shared ones and T)."""
    own = scores.gather(-1, lines.columns.expand(*scores.shape[:2], -1, -1))
    own.masked_fill_(lines.is_filled_up, -math.inf)
    return torch.cat([scores[..., : lines.num_shared], own], dim=-1)


def _exponentials(x: torch.Tensor, num_shared: int, own: Lines | None) -> torch.Tensor:
    """By torch's approximation in whole vectors, exact in what is left."""
    numbers = _approximate_exponentials(x)
    if own is not None:
        behind, exact = numbers[..., num_shared:], _exact_exponentials(x[..., num_shared:])
        torch.where(own.in_eights, behind, exact, out=behind)
    return numbers


def _approximate_exponentials(x: torch.Tensor) -> torch.Tensor:
    """As torch's `fexp_u20`: a polynomial for what lies between two powers of two."""
    powers = x.clamp(min=_LEAST).mul_(_LOG2_E)
    parts = powers - powers.floor()
    polynomial = _POLYNOMIAL[0]
    for number in _POLYNOMIAL[1:]:
        polynomial = torch.addcmul(number, parts, polynomial)
    return powers.sub_(polynomial).mul_(_ONE_BIT).add_(127 * _ONE_BIT).int().view(torch.float32)


def _exact_exponentials(x: torch.Tensor) -> torch.Tensor:
    return x.double().exp_().float()


def _sum(numbers: torch.Tensor, num_shared: int, own: Lines | None) -> torch.Tensor:
    """(..., Q, 1): sixteen lanes, folded, and then what is left, one after the other."""
    num_rows = math.prod(numbers.shape[:-1])
    vectors = numbers.view(num_rows, -1)[:, :num_shared].view(num_rows, -1, _SIXTEEN)
    ones = numbers.new_ones(num_rows, 2, vectors.shape[1])
    lanes = torch.bmm(ones, vectors)[:, 0].view(num_rows, 2, _EIGHT)
    if own is not None:
        behind = numbers[..., num_shared:]
        whole = (behind * own.in_eights).view(num_rows, -1)
        for place, first in enumerate(range(0, whole.shape[1], _EIGHT)):
            lanes[:, place % 2] += whole[:, first : first + _EIGHT]
    eight = lanes[:, 0] + lanes[:, 1]
    total = _folded(eight[:, :_FOUR] + eight[:, _FOUR:], 1)
    if own is not None:
        left = behind.masked_fill(own.in_eights, 0).view(num_rows, -1)
        total = _one_after_the_other([total[:, None], left])
    return total.view(*numbers.shape[:-1], 1)


def _one_after_the_other(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of each row (n, ...), which a product with ones makes in this order."""
    rows = torch.cat(list(numbers), dim=1)
    columns = _filled_up(rows.shape[1], len(rows))
    columns[:, : len(rows)] = rows.t()
    return torch.mm(rows.new_ones(1, rows.shape[1]), columns)[0, : len(rows)]


def _weighed(blocks: Sequence[_Block], values: _Values, shares: torch.Tensor) -> torch.Tensor:
    """The values by their weights, and each by its share: (G, heads of one, Q, D), rounded.

    Added up in any order first; once more in torch's, what might have been rounded otherwise.
    """
    sums, squares = _quick_sums(blocks, values)
    sums *= shares
    slack = sums.abs().mul_(_OF_SUM)
    slack.addcmul_(squares.sqrt_() * shares, values.lengths, value=_OF_LENGTHS)
    outcome, other = (sums - slack).bfloat16(), (sums + slack).bfloat16()
    where = (outcome != other).nonzero(as_tuple=True)
    if len(where[0]):
        exact = _exact_sums(blocks, values, where) * shares[..., 0][where[:3]]
        outcome[where] = exact.bfloat16()
    return outcome


def _quick_sums(blocks: Sequence[_Block], values: _Values) -> tuple[torch.Tensor, torch.Tensor]:
    """In any order; and the sums of the weights' squares (..., 1)."""
    sums = squares = None
    for block in blocks:
        weights, num_shared = block.weights, block.last - block.first
        shared = weights[..., :num_shared].flatten(1, 2)
        some = torch.bmm(shared, values.shared[:, block.first : block.last])
        some = some.view(*weights.shape[:3], -1)
        if block.own is not None:
            behind = weights[..., num_shared:].transpose(1, 2)  # (G, Q, heads of one, T)
            some += torch.matmul(behind, values.own).transpose(1, 2)
        fades = block.fades
        sums = _faded(some, sums, fades)
        own_squares = weights.square().sum(-1, keepdim=True)
        squares = _faded(own_squares, squares, None if fades is None else fades.square())
    assert sums is not None
    assert squares is not None
    return sums, squares


def _exact_sums(
    blocks: Sequence[_Block], values: _Values, where: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """At some places (n): by fours, folded, one after the other; then what is left, backwards."""
    groups, heads, queries, dims = where
    sums = None
    for block in blocks:
        weights = block.weights[groups, heads, queries]  # (n, keys)
        numbers = values.shared[:, block.first : block.last].mT[groups, dims]
        if block.own is not None:
            numbers = torch.cat([numbers, values.own.mT[groups, queries, dims]], dim=1)
        products = weights * numbers
        terms = []
        if sums is not None and block.fades is not None:
            terms.append((sums * block.fades[groups, heads, queries, 0])[:, None])
        if block.own is None:
            terms.append(_in_fours(products))
        else:
            own = products[:, block.last - block.first :]
            left = own.masked_fill(block.own.in_fours[queries], 0)
            own -= left
            terms += _in_fours(products), left.flip(1)
        sums = _one_after_the_other(terms)
    assert sums is not None
    return sums


def _in_fours(products: torch.Tensor) -> torch.Tensor:
    return _folded(products.view(len(products), -1, _FOUR), -1)


def is_exact(dim: int) -> bool:
    """Are these torch's bits here, for heads of such a size? Tried with some numbers."""
    return _comes_out(dim, torch.get_num_threads())


@cache
def _comes_out(dim: int, _num_threads: int) -> bool:
    """With such numbers, too, as cancel out, so that nothing is left but the order of sums."""
    if dim % _FOUR or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return False
    numbers = torch.Generator("cpu").manual_seed(0)
    for length in _TRIED:
        query, key, value = (
            torch.randn(*size, dim, generator=numbers, dtype=torch.float32, device="cpu")
            for size in ((2, 3), (1, length), (1, length))
        )
        for mixed in (key, value), (torch.cat([key, key], 1), torch.cat([value, -value], 1)):
            if not _are_equal(2 * query, *mixed):
                return False
    return True


def _are_equal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Asked of three queries that each have other keys."""
    query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    sees = np.ones((3, key.shape[1]), dtype=np.bool_)
    sees[0, -2:] = sees[1, -1] = sees[2, -3:-1] = False
    lines = lines_of(sees)
    assert lines is not None
    found = attend_lines(query, key, value, lines, query.shape[2] ** -0.5)
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
