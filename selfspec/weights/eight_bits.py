"""Weights in 8 bits by products of whole numbers, on a CPU that has these.

With a billion weights, on two cores of a Zen 5, they read prompts twice as fast as those of
`weights/rounded`, and steps of 8 tokens take 100 ms in place of 214. `weights/rounding` rounds and
multiplies. Here layers that get the same input share one product, and a model that was just loaded
gets such weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from selfspec.attention import EXACT_ATTENTION
from selfspec.compat.generation import attention_implementation
from selfspec.compat.modules import embeddings_of
from selfspec.errors import UnsupportedError
from selfspec.machine.memory import return_freed_memory
from selfspec.weights.formats import PackedMatrix
from selfspec.weights.held_weight import PackedWeight
from selfspec.weights.packing import linears_of
from selfspec.weights.rounded import rounded_matrix
from selfspec.weights.rounded_model import KEPT, attend_exactly, progress
from selfspec.weights.rounding import Int8Rows, Products

# These layers of a module get the same input in most models, and are then computed at once.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _SharedProduct:
    """The product of several layers with one input, until all of them have taken their part."""

    def __init__(self, matrix: Products, x: torch.Tensor) -> None:
        self._matrix, self._x, self.output = ref(matrix), x.clone(), matrix.product(x)
        self.waiting = set(range(len(matrix.spans)))

    def is_of(self, matrix: Products, index: int, x: torch.Tensor) -> bool:
        """Is there a part for this layer? An input that was written by any means is another one."""
        if self._matrix() is not matrix or index not in self.waiting:
            return False
        mode = torch.is_inference_mode_enabled()
        return self.output.is_inference() is mode and torch.equal(self._x, x)


class _ThisThread(threading.local):
    shared: _SharedProduct | None = None  # what it computed last


_this_thread = _ThisThread()


class EightBits:
    """The weight of one layer in 8 bits, which is a part of a matrix."""

    def __init__(self, matrix: Products, index: int) -> None:
        self._matrix, self._index = matrix, index

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = self._part_for(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        if bias is not None:
            output.add_(bias)
        return output.to(x.dtype)

    def _part_for(self, x: torch.Tensor) -> torch.Tensor:
        """This layer's part of the product with an input, which other layers may have had too."""
        matrix, index, shared = self._matrix, self._index, _this_thread.shared
        if len(matrix.spans) == 1:
            return matrix.product(x)
        if shared is None or not shared.is_of(matrix, index, x):
            shared = _this_thread.shared = _SharedProduct(matrix, x)
        shared.waiting.remove(index)
        if not shared.waiting:
            _this_thread.shared = None
        return shared.output.narrow(1, *matrix.spans[index])

    def unpacked(self) -> torch.Tensor:
        return self._matrix.unpacked().narrow(0, *self._matrix.spans[self._index])


class EightBitRows:
    """The weight of an embedding in 8 bits; `head` if the output head has the same weight."""

    def __init__(self, weight: Int8Rows, head: EightBits | None = None) -> None:
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


_FORMS = (EightBits, EightBitRows)


def attends_exactly(model: PreTrainedModel) -> bool:
    return attention_implementation(model.config) == EXACT_ATTENTION


def to_eight_bits(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives a model that was just loaded weights in 8 bits, some layers at a time.

    All else of it gets the dtype, in which it computes between products.
    """
    users, before = users_in_eight_bits(model), model.dtype
    attend_exactly(model)
    with progress("Quantising weights", sum(weight.numel() for weight, _ in users)) as bar:
        for group in _groups(model, users):
            rounded = Int8Rows.joined([Int8Rows.of(weight) for weight, _ in group])
            _hold(model, group, rounded, dtype)
            bar.update(sum(weight.numel() for weight, _ in group))
    for rest in model.parameters():
        if type(rest) is nn.Parameter and rest.dtype is before:
            rest.data = rest.data.to(dtype, copy=True)  # Not a view of a mapped file any more.
    model.config.dtype = dtype
    return_freed_memory()


def is_in_eight_bits(model: nn.Module) -> bool:
    return any(isinstance(getattr(x, "packed", None), _FORMS) for x in model.parameters())


def bytes_in_eight_bits(weight: nn.Parameter) -> int | None:
    """What such a weight takes; None for any other. A head has its own copy of an embedding."""
    packed = getattr(weight, "packed", None)
    if not isinstance(packed, _FORMS):
        return None
    has_head = isinstance(packed, EightBitRows) and packed.head is not None
    return weight.numel() * (2 if has_head else 1)


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


def _groups(model: nn.Module, users: Sequence[_User]) -> Iterator[list[_User]]:
    """The weights of layers that are computed at once."""
    left = {id(user[0]): user for user in users}
    for parent in model.modules():
        for names in _TOGETHER:
            weights = [getattr(getattr(parent, name, None), "weight", None) for name in names]
            group = [left[id(weight)] for weight in weights if id(weight) in left]
            if len({weight.shape[1] for weight, _ in group}) == 1:
                for weight, _ in group:
                    del left[id(weight)]
                yield group
    for user in left.values():
        yield [user]


def _hold(
    model: PreTrainedModel, group: Sequence[_User], rounded: Int8Rows, dtype: torch.dtype
) -> None:
    """Gives modules their weights in 8 bits.

    An input becomes one term if attention does not tell widths apart, else several.
    """
    is_embedding = isinstance(group[0][1][-1], nn.Embedding)
    matrices: list[EightBits] = []
    with torch.inference_mode(False), torch.no_grad():
        if not is_embedding or len(group[0][1]) > 1:
            sizes = [len(weight) for weight, _ in group]
            matrix = Products(rounded, sizes, one_term=attends_exactly(model))
            matrices = [EightBits(matrix, index) for index in range(len(group))]
    parts: Sequence[PackedMatrix] = matrices
    if is_embedding:
        parts = [EightBitRows(rounded, *matrices)]
    for (weight, modules), part in zip(group, parts, strict=True):
        packed = PackedWeight.of(weight, part, KEPT, dtype)
        for module in modules:
            module.weight = packed


@cache
def has_products() -> bool:
    """Does this CPU get products of large whole numbers right, as one with VNNI does?"""
    ones = torch.ones(64, 64, dtype=torch.float32, device="cpu")
    with suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):
        product = Products(Int8Rows.of(ones), [64], one_term=False).product(ones[:4])
        return bool((product - 64).abs().max() < 1)
    return False


def rounded_bits(model: nn.Module) -> int | None:
    """The least bits of a model's rounded weights; None if it has none."""
    matrices = map(rounded_matrix, model.parameters())
    bits = [matrix.bits for matrix in matrices if matrix is not None]
    return min(bits, default=8 if is_in_eight_bits(model) else None)


def weight_bytes(model: nn.Module) -> int:
    """About what a model's weights take."""
    return sum(map(_bytes_of, model.parameters()))


def _bytes_of(weight: nn.Parameter) -> int:
    matrix, in_eight_bits = rounded_matrix(weight), bytes_in_eight_bits(weight)
    if in_eight_bits is not None:
        return in_eight_bits
    return weight.nbytes if matrix is None else matrix.num_bytes
