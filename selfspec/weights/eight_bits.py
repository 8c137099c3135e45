"""A model that was just loaded gets weights in 8 bits; `weights/rounding` rounds and multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from selfspec.compat.modules import embeddings_of
from selfspec.errors import UnsupportedError
from selfspec.machine.memory import return_freed_memory
from selfspec.weights.copies import linears_of
from selfspec.weights.held_weight import PackedWeight
from selfspec.weights.rounding import BYTES, NARROW, Int8Matrix, Int8Rows, Kernels
from selfspec.weights.step_attention import attend_exactly, attends_exactly

_KEPT = (
    "weights in 8 bits can't be written, trained, compiled, moved or converted, nor adapters be "
    "merged into them; edit the original model, or load it without weights='int8'"
)


class EightBitRows:
    """The weight of an embedding in 8 bits; `head` if the output head has the same weight."""

    def __init__(self, weight: Int8Rows, head: Int8Matrix | None) -> None:
        self._weight, self.head = weight, head

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the weight that belong to these ids, in float32."""
        return self._weight.values(ids)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.head is None:
            return linear(x, self.unpacked().to(x.dtype), bias)
        return self.head(x, bias)

    def unpacked(self) -> torch.Tensor:
        return self._weight.values()


_FORMS = (Int8Matrix, EightBitRows)


def to_eight_bits(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives a model that was just loaded weights in 8 bits, some layers at a time.

    All else of it gets the dtype, in which it computes between products.
    """
    users, before = users_in_eight_bits(model), model.dtype
    attend_exactly(model)
    with progress("Quantising weights", sum(weight.numel() for weight, _ in users)) as bar:
        for weight, modules in users:
            _hold(model, weight, modules, Int8Rows.of(weight), dtype)
            bar.update(weight.numel())
    for rest in model.parameters():
        if type(rest) is nn.Parameter and rest.dtype is before:
            rest.data = rest.data.to(dtype, copy=True)  # Not a view of a mapped file any more.
    model.config.dtype = dtype
    return_freed_memory()


def hold_rounded(model: PreTrainedModel, rounded: dict[nn.Parameter, Int8Rows]) -> None:
    """Gives a model weights that are rounded already, in place of these blank ones.

    They are taken out of `rounded`, so that a budget of memory need not hold them twice.
    """
    for weight, modules in users_in_eight_bits(model):
        if weight in rounded:
            _hold(model, weight, modules, rounded.pop(weight), model.dtype)


def progress(what: str, total: int) -> Any:
    """A bar for this many weights."""
    return hf_logging.tqdm(total=total, desc=what, unit_scale=True)


def is_in_eight_bits(model: nn.Module) -> bool:
    return any(isinstance(getattr(x, "packed", None), _FORMS) for x in model.parameters())


def weight_bytes(model: nn.Module) -> int:
    """About what a model's weights take. In 8 bits a head has its own copy of the embedding."""
    total = 0
    for weight in model.parameters():
        packed = getattr(weight, "packed", None)
        total += weight.numel() if isinstance(packed, _FORMS) else weight.nbytes
        if isinstance(packed, EightBitRows) and packed.head is not None:
            total += weight.numel()
    return total


_User = tuple[nn.Parameter, list[Any]]  # A weight, and the modules that have it.


def users_in_eight_bits(model: PreTrainedModel) -> list[_User]:
    """The weights that get 8 bits: those of linear layers and of the embedding."""
    users: dict[int, _User] = {}
    modules: list[Any] = list(linears_of(model))
    if isinstance(embedding := embeddings_of(model), nn.Embedding):
        modules.append(embedding)
    for module in modules:
        users.setdefault(id(module.weight), (module.weight, []))[1].append(module)
    reached, number = sum(weight.numel() for weight, _ in users.values()), model.num_parameters()
    if reached < number / 2:
        raise UnsupportedError(
            "weights='int8' needs a model that has most of its weights in linear layers (here "
            f"{reached / 1e6:.0f} of {number / 1e6:.0f} million); load it without"
        )
    return list(users.values())


def _hold(
    model: PreTrainedModel,
    weight: nn.Parameter,
    modules: Sequence[nn.Module],
    rounded: Int8Rows,
    dtype: torch.dtype,
) -> None:
    """Gives modules that have one weight this weight in 8 bits.

    An input becomes one term if attention does not tell widths apart, else several.
    """
    is_linear = [type(module) is nn.Linear for module in modules]
    with torch.inference_mode(False), torch.no_grad():
        matrix = None
        if any(is_linear):
            matrix = Int8Matrix(kernels().packed, rounded, attends_exactly(model))
        packed = matrix if matrix and all(is_linear) else EightBitRows(rounded, matrix)
    in_eight_bits = PackedWeight.of(weight, packed, _KEPT, dtype)
    for module in modules:
        module.weight = in_eight_bits


@cache
def kernels() -> Kernels:
    """What this CPU computes with: the first that get a product of large numbers right."""
    ones = torch.ones(64, 64, dtype=torch.float32, device="cpu")
    rounded = Int8Rows.of(ones)
    for both in (BYTES, NARROW):
        with suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):
            matrices = [Int8Matrix(kernel, rounded, False) for kernel in both]
            products = torch.cat([matrix(ones[:4], None) for matrix in matrices])
            if (products - 64).abs().max() < 1:
                return both
    raise UnsupportedError("this build of torch has no products of 8 bits for this CPU")


def missing_for_eight_bits() -> str | None:
    """Why this CPU can't compute from 8 bits; None if it can."""
    try:
        kernels()
    except UnsupportedError as error:
        return str(error)
    return None
