"""Operators of torch that have no public name. A build or a version may lack each of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_TYPICAL = 8  # oneDNN packs weights for inputs of about this many tokens.


def calculates_in_half(name: str) -> bool:
    """Can oneDNN calculate in ``"bf16"`` or ``"fp16"`` on this CPU? True if torch can't tell.

    If it is wrongly true, prompts are read in half precision, which is slower.
    """
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return ask is None or bool(ask())


def is_out_of_memory(error: BaseException) -> bool:
    """Did memory run out? On a CPU, torch has no class for this error, only its message."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def is_transforming() -> bool:
    """Does `torch.func` transform what this thread computes, or `torch.jit` record it?"""
    return torch._C._functorch.peek_interpreter_stack() is not None or is_traced()


def is_traced() -> bool:
    """Without it, `torch.jit.trace` fails in words that nobody understands."""
    return torch._C._get_tracing_state() is not None


def reordered(weight: torch.Tensor) -> Any:
    """A weight in oneDNN's own order. Without it, no layer is packed in float32."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL)


def reordered_product(x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, packed, bias, "none", [], ""
    )
    return product


def float16_packed(weight: torch.Tensor) -> object:
    """A float32 weight in float16, in FBGEMM's own order.

    The authors of torch plan to remove it. Without it, CPUs that can't calculate in half precision
    compute half-precision layers as torch does.
    """
    return torch.ops.quantized.linear_prepack_fp16(weight, None)


def float16_product(x: torch.Tensor, packed: object) -> torch.Tensor:
    product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return product


def float16_unpacked(packed: object) -> torch.Tensor:
    weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(packed)[0]
    return weight


def int8_packed(weight: torch.Tensor) -> Any:
    """An int8 weight in oneDNN's own order. Without it, no model is loaded with 8 bits."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def int8_unpacked(packed: Any) -> torch.Tensor:
    numbers: torch.Tensor = packed.to_dense().t().contiguous()
    return numbers


def int8_vnni_product(
    x: torch.Tensor, packed: Any, scale: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """The float32 product of uint8 inputs, whose zero is 128, with packed weights.

    Each row of the weights has a scale, and an int64 zero that says where its 0 is. Sums are whole
    numbers.
    """
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def int8_product(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product (T, O) of bfloat16 inputs (T, I) with int8 rows (O, I), each with a scale.

    Without it, no model is loaded with weights in 8 bits. 16 must divide I: else torch crashes.
    """
    product: torch.Tensor = torch.ops.aten._weight_int8pack_mm.default(x, numbers, scales)
    return product


def int4_product(
    x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor
) -> torch.Tensor:
    """The same with packed numbers of 4 bits; `scales` (groups, O, 2) has zero points too."""
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    product: torch.Tensor = multiply(x, packed, group, scales)
    return product


def int4_packed(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 15 (O, I) of int32, in the order that this processor reads: (O, I / 2).

    64 must divide O. Without it, no model is loaded with weights in 4 bits.
    """
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(numbers, 2)
    return packed


def int4_unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The numbers less 8 in bfloat16: (blocks, I, rows of a block in the order of `int4_order`).

    Two bytes are four numbers, which are read from a table: that takes a third of the time of
    shifts.
    """
    numbers = _four_numbers(packed)
    return numbers.view(-1, 2 * packed.shape[1], len(int4_order()))


@cache
def int4_order() -> torch.Tensor:
    """Which row of a block each number of a column belongs to, in the order of memory.

    Torch packs otherwise for AVX-512, AVX2 and other processors. Here two columns with the numbers
    of their rows are packed. All rows of a block come before the second column.
    """
    rows = torch.arange(64, dtype=torch.int32, device="cpu")[:, None].expand(64, 2)
    packed = (int4_packed(part.contiguous()) for part in (rows % 16, rows // 16))
    low, high = (_four_numbers(part).long() + 8 for part in packed)
    order = low + 16 * high
    return order[:64] if len(set(order[:64].tolist())) == 64 else order[:32]


def _four_numbers(packed: torch.Tensor) -> torch.Tensor:
    """The four numbers of every two bytes, less 8, as one row of bfloat16."""
    words = packed.view(-1).view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF).view(32, -1)
    # Torch gathers the rows of a matrix in several threads.
    return torch.gather(_table_of_words().expand(32, -1), 1, words).view(torch.bfloat16).view(-1)


@cache
def _table_of_words() -> torch.Tensor:
    words = torch.arange(1 << 16, dtype=torch.int32, device="cpu")[:, None]
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int32, device="cpu")
    return ((words >> shifts) & 15).sub_(8).to(torch.bfloat16).view(torch.int64).view(-1)
