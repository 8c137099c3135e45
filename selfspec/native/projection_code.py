"""Products of a few tokens with a matrix of weights, in torch's order of sums. Needs llvmlite.

torch adds up a token's product with a row of weights in 64 lanes, each of every 64th product, and
folds them in the end. Here so many tokens are done at once that a row is read and widened once for
them. What is added up stays in registers: for several tokens half of the lanes at a time.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from llvmlite import ir

from selfspec.native.code import F32, I64, POINTER, Code, constant, vector

__all__ = ["LANES", "projection_code"]

LANES = 64
_TOGETHER = {torch.bfloat16: 3, torch.float16: 2}  # tokens: by time
_ROWS, _TOKENS = 64, 6  # that stay in a cache while they meet


def projection_code(dtype: torch.dtype) -> ir.Module:
    """Of (weight, tokens, bias or null, outcome, rows, features, number of tokens)."""
    code = Code(dtype)
    _Projection(code, _TOGETHER[dtype]).write()
    return code.module


class _Projection:
    def __init__(self, code: Code, together: int) -> None:
        self._code = code
        self._together = together
        self._weight, self._tokens, self._bias, self._outcome = (
            code.argument(place, POINTER) for place in range(4)
        )
        self._num_rows, self._size, self._num_tokens = (code.argument(4 + n) for n in range(3))
        self._wide = code.room(code.mul(self._size, I64(_TOKENS)))  # tokens in float32

    def write(self) -> None:
        """Rows by rows, and for each of them tokens by tokens."""
        code = self._code
        first, end = code.share(self._num_rows)
        with code.loop(first, end, _ROWS) as rows:
            row_end = self._smaller(code.add(rows.place, I64(_ROWS)), end)
            with code.loop(I64(0), self._num_tokens, _TOKENS) as tokens:
                token_end = self._smaller(code.add(tokens.place, I64(_TOKENS)), self._num_tokens)
                self._widen(tokens.place, token_end)
                with code.loop(rows.place, row_end) as row:
                    self._row(row.place, tokens.place, token_end)
        code.ret_void()

    def _widen(self, first: Any, end: Any) -> None:
        """Puts some tokens where they are read from."""
        code = self._code
        begin = code.mul(first, self._size)
        with code.loop(begin, code.mul(end, self._size), LANES) as some:
            numbers = code.read_half(self._tokens, some.place, LANES)
            code.write(numbers, self._wide, code.sub(some.place, begin))

    def _smaller(self, one: Any, other: Any) -> Any:
        return self._code.select(self._code.icmp_signed("<", one, other), one, other)

    def _row(self, row: Any, first: Any, end: Any) -> None:
        """One row times some tokens, together as many as can be."""
        code, number = self._code, I64(self._together)
        left = code.srem(code.sub(end, first), number)
        whole = code.sub(end, left)
        with code.loop(first, whole, self._together) as some:
            self._some(row, first, some.place, self._together)
        for few in range(1, self._together):
            with code.if_then(code.icmp_signed("==", left, I64(few))):
                self._some(row, first, whole, few)

    def _some(self, row: Any, first: Any, token: Any, number: int) -> None:
        """One row times so many tokens from `token` on; `first` is the first that is widened."""
        code = self._code
        weight = code.half(self._weight, code.mul(row, self._size))
        tokens = [
            code.at(self._wide, code.mul(code.sub(code.add(token, I64(n)), first), self._size), F32)
            for n in range(number)
        ]
        at_once = LANES if number == 1 else LANES // 2
        parts = [self._lanes(weight, tokens, at, at_once) for at in range(0, LANES, at_once)]
        for place, lanes in enumerate(zip(*parts, strict=True)):
            total = self._with_bias(code.folded(reduce(code.fadd, lanes)), row)
            of_token = code.mul(code.add(token, I64(place)), self._num_rows)
            code.write_half(total, self._outcome, code.add(of_token, row))

    def _lanes(self, weight: Any, tokens: list[Any], first: int, number: int) -> list[Any]:
        """For each token, what so many lanes from `first` on come to."""
        code, kind = self._code, vector(F32, number)
        nothing = [constant(kind, 0.0)] * len(tokens)
        with code.loop(I64(first), self._size, LANES, nothing) as along:
            if len(tokens) > 1:  # one alone goes on fast enough that memory is always busy
                code.prefetch_half(weight, code.add(along.place, self._size))
            wide = code.read_half(weight, along.place, number)
            for token, total in zip(tokens, along.values, strict=True):
                numbers = code.read(token, along.place, kind)
                along.next.append(code.fused(wide, numbers, total))
        return along.values

    def _with_bias(self, total: Any, row: Any) -> Any:
        code, before = self._code, self._code.block
        with code.if_then(code.is_there(self._bias)):
            more = code.fadd(total, code.read_half(self._bias, row))
            there = code.block
        found = code.phi(F32)
        found.add_incoming(total, before)
        found.add_incoming(more, there)
        return found
