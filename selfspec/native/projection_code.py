"""Products of a few tokens with a matrix of weights, in torch's order of sums. Needs llvmlite.

torch adds up a token's product with a row of weights in 64 lanes, each of every 64th product, and
folds them in the end. Here a row is read and widened once for some tokens, and only so many lanes
are done at a time that all that is added up stays in registers. Eight rows are folded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from selfspec.native.code import F32, I32, I64, POINTER, Code, constant, vector

__all__ = ["LANES", "projection_code"]

LANES = 64
_ROWS = 8  # that are folded at once: there must be so many
_AT_ONCE = {1: 64, 2: 32, 3: 32, 4: 16}  # lanes, by how many tokens are done together
_TOKENS = max(_AT_ONCE)
_BLOCKS = 8  # of rows, that stay in a cache while they meet the tokens
_LINE = 32  # numbers of half precision that memory hands out together

# where the sums of eight vectors' halves, quarters and eighths stand, so that they end in order
_HALVES = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
_QUARTERS = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
_EIGHTHS = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]


def projection_code(dtype: torch.dtype) -> ir.Module:
    """Of (weight, tokens, bias or null, outcome, rows, features, number of tokens)."""
    code = Code(dtype)
    _Projection(code).write()
    return code.module


class _Projection:
    def __init__(self, code: Code) -> None:
        self._code = code
        self._weight, self._tokens, self._bias, self._outcome = (
            code.argument(place, POINTER) for place in range(4)
        )
        self._num_rows, self._size, self._num_tokens = (code.argument(4 + n) for n in range(3))
        self._wide = code.room(code.mul(self._size, I64(_TOKENS)))  # tokens in float32
        self._sums = code.room(_ROWS * _TOKENS * LANES)

    def write(self) -> None:
        """Blocks of rows by blocks of rows, and for each of them tokens by tokens."""
        code = self._code
        rows = I64(_ROWS)
        num_blocks = code.sdiv(code.add(self._num_rows, I64(_ROWS - 1)), rows)
        first, end = code.share(num_blocks)
        with code.loop(first, end, _BLOCKS) as some:
            some_end = self._smaller(code.add(some.place, I64(_BLOCKS)), end)
            with code.loop(I64(0), self._num_tokens, _TOKENS) as tokens:
                left = code.sub(self._num_tokens, tokens.place)
                number = self._smaller(left, I64(_TOKENS))
                self._widen(tokens.place, number)
                with code.loop(some.place, some_end) as block:
                    last = code.sub(self._num_rows, rows)  # what is left over is done with others
                    row = self._smaller(code.mul(block.place, rows), last)
                    for each in _AT_ONCE:
                        with code.if_then(code.icmp_signed("==", number, I64(each))):
                            self._block(row, tokens.place, each)
        code.ret_void()

    def _smaller(self, one: Any, other: Any) -> Any:
        return self._code.select(self._code.icmp_signed("<", one, other), one, other)

    def _widen(self, first: Any, number: Any) -> None:
        """Puts some tokens where they are read from."""
        code = self._code
        begin = code.mul(first, self._size)
        with code.loop(I64(0), code.mul(number, self._size), LANES) as some:
            numbers = code.read_half(self._tokens, code.add(begin, some.place), LANES)
            code.write(numbers, self._wide, some.place)

    def _block(self, row: Any, token: Any, number: int) -> None:
        """Eight rows times so many tokens."""
        code, at_once = self._code, _AT_ONCE[number]
        with code.loop(I64(0), I64(_ROWS)) as each:
            weight = code.half(self._weight, code.mul(code.add(row, each.place), self._size))
            for lane in range(0, LANES, at_once):
                for place, lanes in enumerate(self._lanes(weight, lane, at_once, number)):
                    of_row = code.mul(each.place, I64(_TOKENS * LANES))
                    code.write(lanes, self._sums, code.add(of_row, I64(place * LANES + lane)))
        for place in range(number):
            total = self._with_bias(self._folded(place), row)
            of_token = code.mul(code.add(token, I64(place)), self._num_rows)
            code.write_half(total, self._outcome, code.add(of_token, row))

    def _lanes(self, weight: Any, lane: int, at_once: int, number: int) -> list[Any]:
        """What some lanes from `lane` on come to, for each of so many tokens."""
        code, kind = self._code, vector(F32, at_once)
        with code.loop(I64(lane), self._size, LANES, [constant(kind, 0.0)] * number) as along:
            if number > 1 and lane % _LINE == 0:  # one alone keeps memory busy by itself
                code.prefetch_half(weight, code.add(along.place, self._size))
            wide = code.read_half(weight, along.place, at_once)
            for place, total in enumerate(along.values):
                at = code.add(along.place, code.mul(self._size, I64(place)))
                along.next.append(code.fused(wide, code.read(self._wide, at, kind), total))
        return along.values

    def _folded(self, place: int) -> Any:
        """The sums of the eight rows' lanes, by halves, the upper one to the lower one."""
        code, vectors = self._code, []
        for row in range(_ROWS):
            at = I64((row * _TOKENS + place) * LANES)
            lanes = code.read(self._sums, at, vector(F32, LANES))
            while lanes.type.count > _ROWS:
                lanes = code.fadd(*code.halves_of(lanes))
            vectors.append(lanes)
        four = [self._both(vectors[n], vectors[n + 4], _HALVES) for n in range(4)]
        two = [self._both(four[n], four[n + 1], _QUARTERS) for n in (0, 2)]
        return self._both(two[0], two[1], _EIGHTHS)

    def _both(self, one: Any, other: Any, places: Sequence[list[int]]) -> Any:
        code, kind = self._code, vector(I32, _ROWS)
        lower, upper = (code.shuffle_vector(one, other, ir.Constant(kind, each)) for each in places)
        return code.fadd(lower, upper)

    def _with_bias(self, total: Any, row: Any) -> Any:
        code, before = self._code, self._code.block
        with code.if_then(code.is_there(self._bias)):
            more = code.fadd(total, code.read_half(self._bias, row, _ROWS))
            there = code.block
        found = code.phi(total.type)
        found.add_incoming(total, before)
        found.add_incoming(more, there)
        return found
