"""What the kernels' code is written with. Needs llvmlite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir

from selfspec.native.kernel import ENTRY, NUM_THREADS, THREAD

__all__ = ["F32", "I32", "I64", "POINTER", "Code", "Loop", "constant", "vector"]

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()


def vector(element: Any, size: int) -> Any:
    """The type of so many."""
    return ir.VectorType(element, size)


def constant(kind: Any, number: float) -> Any:
    """The number, or a vector full of it."""
    size = kind.count if isinstance(kind, ir.VectorType) else None
    return ir.Constant(kind, number if size is None else [number] * size)


class Loop:
    """Values that go from one round to the next: `values` in a round, and behind the loop."""

    def __init__(self, place: Any, values: Sequence[Any]) -> None:
        self.place = place
        self.values = list(values)
        self.next: list[Any] = []  # what a round leaves, in their order


class Code(ir.IRBuilder):  # type: ignore[misc]
    """A kernel that is being written, for numbers of half precision in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        whole = ir.Module("selfspec")
        entry = ir.Function(whole, ir.FunctionType(ir.VoidType(), [POINTER]), ENTRY)
        super().__init__(entry.append_basic_block())
        self._arguments = entry.args[0]
        self._asked = {
            name: ir.Function(whole, ir.FunctionType(I32, []), name)
            for name in (THREAD, NUM_THREADS)
        }

    def argument(self, place: int, kind: Any = I64) -> Any:
        """What was passed at that place: a whole number or a pointer."""
        return self.load(self.at(self._arguments, I64(place), I64), typ=kind)

    def is_there(self, pointer: Any) -> Any:
        """Was it passed, not null?"""
        return self.icmp_unsigned("!=", self.ptrtoint(pointer, I64), I64(0))

    def room(self, size: Any) -> Any:
        """A pointer to memory for so many float32 numbers, of this thread alone."""
        room = self.alloca(F32, size)
        room.align = 32
        return self.bitcast(room, POINTER)

    def share(self, number: Any) -> tuple[Any, Any]:
        """From where to where this thread works, of so many."""
        me, of = (self.zext(self.call(self._asked[n], []), I64) for n in (THREAD, NUM_THREADS))
        first = self.sdiv(self.mul(number, me), of)
        return first, self.sdiv(self.mul(number, self.add(me, I64(1))), of)

    def ask(self, name: str, kind: Any, *values: Any) -> Any:
        """A function from outside, or one of LLVM's own, of values that are all of one kind."""
        known = self.module.globals.get(name)
        signature = ir.FunctionType(kind, [kind] * len(values))
        return self.call(known or ir.Function(self.module, signature, name), values)

    def fused(self, one: Any, other: Any, sum_: Any) -> Any:
        """``one * other + sum_``, rounded once."""
        kind = sum_.type
        name = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        return self.ask(f"llvm.fma.{name}", kind, one, other, sum_)

    def at(self, pointer: Any, place: Any, kind: Any) -> Any:
        """A pointer to the element at that place."""
        return self.gep(pointer, [place], source_etype=kind)

    def read(self, pointer: Any, place: Any, kind: Any) -> Any:
        """One number, or a vector of them that begins at that number's place."""
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        value = self.load(self.at(pointer, place, element), typ=kind)
        value.align = 4
        return value

    def write(self, value: Any, pointer: Any, place: Any) -> None:
        """As `read`."""
        kind = value.type
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        where = self.bitcast(self.at(pointer, place, element), ir.PointerType(kind))
        self.store(value, where).align = 4

    def half(self, pointer: Any, place: Any) -> Any:
        """A pointer to the number of half precision at that place."""
        return self.at(pointer, place, I16)

    def prefetch_half(self, pointer: Any, place: Any) -> None:
        """Asks memory for what will be read from there; nothing happens where there is nothing."""
        name = "llvm.prefetch.p0"
        signature = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        known = self.module.globals.get(name)
        function = known or ir.Function(self.module, signature, name)
        # to read, to stay in caches, data
        self.call(function, [self.half(pointer, place), I32(0), I32(3), I32(1)])

    def read_half(self, pointer: Any, place: Any, size: int = 1) -> Any:
        """One number or some, in float32."""
        halves = self.load(self.half(pointer, place), typ=_some(self._half_kind, size))
        halves.align = 2
        if self._dtype is torch.float16:
            return self.fpext(halves, _some(F32, size))
        wide = _some(I32, size)
        return self.bitcast(self.shl(self.zext(halves, wide), constant(wide, 16)), _some(F32, size))

    def rounded(self, value: Any) -> Any:
        """To half precision, and in float32 again."""
        kind, size = value.type, getattr(value.type, "count", 1)
        if self._dtype is torch.float16:
            return self.fpext(self.fptrunc(value, _some(F16, size)), kind)
        bits = self._rounded_bits(value)
        upper = self.and_(bits, constant(bits.type, 0xFFFF0000))
        return self.bitcast(upper, kind)

    def write_half(self, value: Any, pointer: Any, place: Any) -> None:
        """A number, or a vector of them, rounded."""
        size = getattr(value.type, "count", 1)
        if self._dtype is torch.float16:
            halves = self.fptrunc(value, _some(F16, size))
        else:
            bits = self._rounded_bits(value)
            halves = self.trunc(self.lshr(bits, constant(bits.type, 16)), _some(I16, size))
        where = self.bitcast(self.half(pointer, place), ir.PointerType(halves.type))
        self.store(halves, where).align = 2

    def halves_of(self, value: Any) -> tuple[Any, Any]:
        """The lower and the upper half of a vector."""
        size = value.type.count // 2
        lower, upper = (
            ir.Constant(vector(I32, size), list(range(first, first + size))) for first in (0, size)
        )
        return self.shuffle_vector(value, value, lower), self.shuffle_vector(value, value, upper)

    def folded(self, value: Any) -> Any:
        """The sum of a vector, by halves, the upper one to the lower one."""
        while value.type.count > 1:
            value = self.fadd(*self.halves_of(value))
        return self.extract_element(value, I32(0))

    @contextmanager
    def loop(
        self, first: Any, end: Any, step: int = 1, values: Sequence[Any] = ()
    ) -> Iterator[Loop]:
        """Rounds from `first` on, before `end`."""
        before = self.block
        head, body, behind = (self.append_basic_block(name) for name in ("head", "body", "behind"))
        self.branch(head)
        self.position_at_end(head)
        place, *carried = (self.phi(kind.type) for kind in (first, *values))
        for phi, value in zip((place, *carried), (first, *values), strict=True):
            phi.add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", place, end), body, behind)
        self.position_at_end(body)
        around = Loop(place, carried)
        yield around
        for phi, value in zip(
            (place, *carried), (self.add(place, I64(step)), *around.next), strict=True
        ):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(behind)

    @property
    def _half_kind(self) -> Any:
        return F16 if self._dtype is torch.float16 else I16

    def _rounded_bits(self, value: Any) -> Any:
        """The bits of which the upper sixteen are those of bfloat16, the nearest, ties to even."""
        kind = _some(I32, getattr(value.type, "count", 1))
        bits = self.bitcast(value, kind)
        last = self.and_(self.lshr(bits, constant(kind, 16)), constant(kind, 1))
        nearest = self.add(bits, self.add(last, constant(kind, 0x7FFF)))
        is_number = self.fcmp_ordered("ord", value, value)
        return self.select(is_number, nearest, constant(kind, 0x7FC00000))


def _some(element: Any, size: int) -> Any:
    return element if size == 1 else vector(element, size)
