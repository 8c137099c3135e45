"""Attention of single queries, in the order of sums that torch has for each alone. Needs llvmlite.

Scores are added up in four lanes, exponentials in sixteen, values by fours; each time the lanes are
folded in the end, and what is left over comes behind, one after the other. Keys are done in blocks:
what was summed up before fades by how far the highest score has risen since. Whole vectors go
through torch's approximate exponential, what is left of them through C's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from llvmlite import ir

from selfspec.native.code import F32, I32, I64, POINTER, Code, constant, vector
from selfspec.native.kernel import EXP

__all__ = ["attention_code"]

_BLOCK = 512
_FOUR, _EIGHT, _SIXTEEN = 4, 8, 16

_LOG2_E = 1.44269502162933349609375
_LEAST = -87.0
_POLYNOMIAL = (-0.0792042402, -0.224338365, 0.303542605, 0.000107034349)
_ONE_BIT = 2.0**23


def attention_code(dtype: torch.dtype, dim: int) -> ir.Module:
    """Of the arguments that `attention.attend` passes, for heads of such a size."""
    code = Code(dtype)
    _Attention(code, dim).write()
    return code.module


class _Attention:
    def __init__(self, code: Code, dim: int) -> None:
        self._code = code
        self._dim = dim
        self._query, self._key, self._value, self._columns, self._lengths, self._outcome = (
            code.argument(place, POINTER) for place in range(6)
        )
        (
            self._num_queries,
            self._num_heads,
            self._num_sharing,  # heads of queries, one of keys
            self._longest,  # line of columns
            self._query_head,  # from here on: how far apart they lie
            self._query_step,
            self._key_head,
            self._key_step,
            self._value_head,
            self._value_step,
        ) = (code.argument(6 + place) for place in range(10))
        self._scale = code.bitcast(code.trunc(code.argument(16), I32), F32)
        self._totals = code.argument(17, POINTER)
        self._numbers = code.room(dim)  # of the query
        self._scores = code.room(_BLOCK)
        self._sums = code.room(dim)

    def write(self) -> None:
        """Head by head, and for each of them query by query: they meet the same keys."""
        code = self._code
        first, end = code.share(code.mul(self._num_heads, self._num_queries))
        with code.loop(first, end) as task:
            head = code.sdiv(task.place, self._num_queries)
            self._attend(head, code.srem(task.place, self._num_queries))
        code.ret_void()

    def _attend(self, head: Any, query: Any) -> None:
        code = self._code
        group = code.sdiv(head, self._num_sharing)
        key = code.half(self._key, code.mul(group, self._key_head))
        value = code.half(self._value, code.mul(group, self._value_head))
        columns = code.at(self._columns, code.mul(query, self._longest), I32)
        length = code.sext(code.read(self._lengths, query, I32), I64)
        self._take_in(head, query)
        start = (constant(F32, -math.inf), constant(F32, 0.0))
        with code.loop(I64(0), length, _BLOCK, start) as block:
            top, total = block.values
            here = code.at(columns, block.place, I32)
            left = code.sub(length, block.place)
            number = code.select(code.icmp_signed("<", left, I64(_BLOCK)), left, I64(_BLOCK))
            highest = self._score(key, here, number, top)
            fade = code.ask(EXP, F32, code.fsub(top, highest))
            total = code.fused(total, fade, self._weigh(number, highest))
            self._add_values(value, here, number, fade)
            block.next += highest, total
        number = code.add(code.mul(query, self._num_heads), head)
        with code.if_then(code.is_there(self._totals)):
            code.write(block.values[1], self._totals, number)
        share = code.fdiv(constant(F32, 1.0), block.values[1])
        place = code.mul(number, I64(self._dim))
        kind = vector(F32, _EIGHT)
        for first in range(0, self._dim, _EIGHT):
            sums = code.read(self._sums, I64(first), kind)
            outcome = code.fmul(sums, self._spread(share, _EIGHT))
            code.write_half(outcome, self._outcome, code.add(place, I64(first)))

    def _take_in(self, head: Any, query: Any) -> None:
        """The query's numbers; nothing is summed up yet."""
        code = self._code
        place = code.add(code.mul(head, self._query_head), code.mul(query, self._query_step))
        kind = vector(F32, _EIGHT)
        for first in range(0, self._dim, _EIGHT):
            numbers = code.read_half(self._query, code.add(place, I64(first)), _EIGHT)
            code.write(numbers, self._numbers, I64(first))
            code.write(constant(kind, 0.0), self._sums, I64(first))

    def _score(self, key: Any, columns: Any, number: Any, top: Any) -> Any:
        """Fills in the scores of a block; the highest so far."""
        code, kind = self._code, vector(F32, _FOUR)
        with code.loop(I64(0), number, 1, [top]) as each:
            place = self._column(columns, each.place, self._key_step)
            lanes = constant(kind, 0.0)
            for first in range(0, self._dim, _FOUR):
                keys = code.read_half(key, code.add(place, I64(first)), _FOUR)
                numbers = code.read(self._numbers, I64(first), kind)
                lanes = code.fused(numbers, keys, lanes)
            score = code.fmul(code.folded(lanes), self._scale)
            code.write(score, self._scores, each.place)
            is_higher = code.fcmp_ordered(">", score, each.values[0])
            each.next.append(code.select(is_higher, score, each.values[0]))
        return each.values[0]

    def _column(self, columns: Any, place: Any, step: Any) -> Any:
        code = self._code
        return code.mul(code.sext(code.read(columns, place, I32), I64), step)

    def _weigh(self, number: Any, highest: Any) -> Any:
        """Puts rounded exponentials in the place of scores; the sum of those not rounded."""
        code, kind = self._code, vector(F32, _EIGHT)
        top = self._spread(highest, _EIGHT)
        in_sixteens, in_eights = (code.and_(number, I64(-size)) for size in (_SIXTEEN, _EIGHT))
        nothing = constant(kind, 0.0)
        with code.loop(I64(0), in_sixteens, _SIXTEEN, [nothing, nothing]) as two:
            for place, lanes in enumerate(two.values):
                here = code.add(two.place, I64(place * _EIGHT))
                two.next.append(code.fadd(lanes, self._exponentials(here, top)))
        with code.loop(in_sixteens, in_eights, _EIGHT, two.values[:1]) as one:
            one.next.append(code.fadd(one.values[0], self._exponentials(one.place, top)))
        total = code.folded(code.fadd(one.values[0], two.values[1]))
        with code.loop(in_eights, number, 1, [total]) as left:
            score = code.read(self._scores, left.place, F32)
            exponential = code.ask(EXP, F32, code.fsub(score, highest))
            code.write(code.rounded(exponential), self._scores, left.place)
            left.next.append(code.fadd(left.values[0], exponential))
        return left.values[0]

    def _exponentials(self, place: Any, top: Any) -> Any:
        """torch's `fexp_u20`: a polynomial for what lies between two powers of two."""
        code, kind = self._code, vector(F32, _EIGHT)
        apart = code.fsub(code.read(self._scores, place, kind), top)
        least = constant(kind, _LEAST)
        apart = code.select(code.fcmp_ordered("<", apart, least), least, apart)
        powers = code.fmul(apart, constant(kind, _LOG2_E))
        parts = code.fsub(powers, code.ask("llvm.floor.v8f32", kind, powers))
        polynomial = constant(kind, _POLYNOMIAL[0])
        for number in _POLYNOMIAL[1:]:
            polynomial = code.fused(parts, polynomial, constant(kind, number))
        scaled = code.fmul(code.fsub(powers, polynomial), constant(kind, _ONE_BIT))
        bits = code.fptosi(code.fadd(scaled, constant(kind, 127 * _ONE_BIT)), vector(I32, _EIGHT))
        exponentials = code.bitcast(bits, kind)
        code.write(code.rounded(exponentials), self._scores, place)
        return exponentials

    def _add_values(self, value: Any, columns: Any, number: Any, fade: Any) -> None:
        """To what is summed up so far, which fades: by fours, and what is left over backwards."""
        code = self._code
        in_fours = code.and_(number, I64(-_FOUR))
        size = next(size for size in (32, 16, _EIGHT) if self._dim % size == 0)
        for first in range(0, self._dim, size):
            faded = code.fmul(
                code.read(self._sums, I64(first), vector(F32, size)), self._spread(fade, size)
            )
            with code.loop(I64(0), in_fours, _FOUR, [faded]) as four:
                terms = [
                    self._term(value, columns, code.add(four.place, I64(n)), first, size)
                    for n in range(_FOUR)
                ]
                even, odd = (code.fadd(terms[n], terms[n + 2]) for n in (0, 1))
                four.next.append(code.fadd(four.values[0], code.fadd(even, odd)))
            with code.loop(I64(0), code.sub(number, in_fours), 1, four.values) as left:
                last = code.sub(code.sub(number, I64(1)), left.place)
                term = self._term(value, columns, last, first, size)
                left.next.append(code.fadd(left.values[0], term))
            code.write(left.values[0], self._sums, I64(first))

    def _term(self, value: Any, columns: Any, place: Any, first: int, size: int) -> Any:
        """A value's numbers from `first` on, by its weight: exact in float32."""
        code = self._code
        weight = self._spread(code.read(self._scores, place, F32), size)
        at = code.add(self._column(columns, place, self._value_step), I64(first))
        return code.fmul(weight, code.read_half(value, at, size))

    def _spread(self, number: Any, size: int) -> Any:
        """A vector full of it."""
        code, kind = self._code, vector(F32, size)
        one = code.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
        return code.shuffle_vector(one, one, constant(vector(I32, size), 0))
