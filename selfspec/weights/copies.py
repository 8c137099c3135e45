"""Packed copies beside the weights of linear layers: of what they were made, and how they are used.

Knows layers and their weights; not when packing pays.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from selfspec.compat.modules import encoder_of, is_compiled, num_writes
from selfspec.weights.formats import PackedMatrix, own_linear
from selfspec.weights.held_weight import HeldWeight

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_AT_ONCE = 8  # Rows of words that are added up in one operation; fewer take longer than to read.
_numbers = WeakIdKeyDictionary()
_counter = count()


class Origin(NamedTuple):
    """What a weight was when its copy was made. If it is another value now, the copy is not used.

    Torch does not count writes through `.data`, so sums over the weight's contents belong to it. To
    add up all weights of a model takes a part of a plain step's time.
    """

    place: tuple[int, int]  # the address, and how often torch has seen it written
    layout: tuple[object, ...]
    contents: bytes

    @classmethod
    def of(cls, weight: torch.Tensor) -> Origin:
        """The origin of a copy that is made now."""
        layout = (weight.shape, weight.stride(), weight.dtype, weight.device)
        sums = _word_sums(_matrix_of(weight)).cpu().numpy().tobytes()
        return cls(_place_of(weight), layout, sums)


def contents_of(model: nn.Module) -> tuple[Hashable, ...]:
    """The origins of all weights and buffers: what is computed with others must not be used."""
    return tuple(
        _known_of(tensor)
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )


def is_offloaded(model: nn.Module) -> bool:
    """Are weights elsewhere until their layer computes, as those that accelerate moves?"""
    weights = (weight for weight in model.parameters() if not isinstance(weight, HeldWeight))
    return any(weight.is_meta for weight in weights)


def _known_of(tensor: torch.Tensor) -> Hashable:
    if isinstance(tensor, HeldWeight):  # Nobody can write to it.
        return _number_of(tensor)
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or not tensor.numel():  # Such as one in 4 bits.
        return _place_of(tensor)
    return Origin.of(tensor)


class PackedCopy(NamedTuple):
    """The packed copy of one weight; `matrix` is None for a weight that no format can hold."""

    origin: Origin
    matrix: PackedMatrix | None
    least_tokens: int = 1  # For fewer tokens the weight itself is faster.

    def matrix_for(self, weight: torch.Tensor, x: torch.Tensor) -> PackedMatrix | None:
        """The matrix, if it is of this weight, can multiply this input, and is faster then."""
        if self.origin.place != _place_of(weight) or x.numel() < self.least_tokens * x.shape[-1]:
            return None
        is_plain = x.dim() > 1 and x.dtype is weight.dtype and not torch.is_autocast_enabled("cpu")
        return self.matrix if is_plain else None


_Copies = Mapping[nn.Linear, PackedCopy]


class _ThisThread(threading.local):
    copies: _Copies | None = None  # that layers use in this thread


_this_thread = _ThisThread()


class _StandIn:
    """Replaces one layer's `forward` while any thread uses copies."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        copies, weight, bias = _this_thread.copies, self._module.weight, self._module.bias
        if copies is None or not x.numel():
            return linear(x, weight, bias)
        copy = copies.get(self._module)
        matrix = copy.matrix_for(weight, x) if copy else None
        return own_linear(x, weight, bias) if matrix is None else matrix(x, bias)


class StandIns:
    """The stand-ins that are in a model's layers while at least one thread uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._put: set[nn.Linear] = set()

    @contextmanager
    def put(self, layers: Sequence[nn.Linear], copies: _Copies) -> Iterator[None]:
        """Inside, and in this thread alone, these layers compute from the copies that they have."""
        with self._lock:
            self._num_inside += 1
            for module in filter(_has_own_forward, layers):
                vars(module)["forward"] = _StandIn(module)
                self._put.add(module)
        outside, _this_thread.copies = _this_thread.copies, copies
        try:
            yield
        finally:
            _this_thread.copies = outside
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    # Other code may have replaced it.
                    for module in filter(_has_own_forward, self._put):
                        vars(module).pop("forward", None)
                    self._put.clear()


def linears_of(model: nn.Module) -> list[nn.Linear]:
    """The model's plain linear layers; none if the model is compiled.

    Leaves out quantised layers, layers whose `forward` other code has replaced, and those of an
    encoder, which no step runs.
    """
    encoder = encoder_of(model)
    linears, unused = [], set() if encoder is None else set(encoder.modules())
    for module in model.modules():
        if is_compiled(module):
            return []
        if type(module) is nn.Linear and _has_own_forward(module) and module not in unused:
            linears.append(module)
    return linears


def num_owners(model: nn.Module) -> Counter[int]:
    """How many modules have a weight, by its id."""
    return Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))


def _has_own_forward(module: nn.Linear) -> bool:
    """Has nothing but a stand-in replaced the layer's `forward`?"""
    forward = vars(module).get("forward")
    return forward is None or isinstance(forward, _StandIn)


def _place_of(weight: torch.Tensor) -> tuple[int, int]:
    try:
        return weight.data_ptr(), num_writes(weight)
    except RuntimeError:  # Some quantised weights consist of several tensors.
        return _number_of(weight), num_writes(weight)


def _number_of(weight: torch.Tensor) -> int:
    """A number that no other weight gets, also after this one is gone."""
    if weight not in _numbers:
        _numbers[weight] = next(_counter)
    return int(_numbers[weight])


def _matrix_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a strided tensor as a contiguous matrix, whose bits torch lets be viewed."""
    values = tensor.detach().resolve_conj().resolve_neg()
    values = values.int_repr() if values.is_quantized else values
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(1 if values.dim() < 2 else len(values), -1)


def _word_sums(weight: torch.Tensor) -> torch.Tensor:
    """The weight's bits as integers, of which every n-th is summed up.

    n shares no factor with the number of integers in a row, and exceeds that and the number of
    rows. So no two integers of one row or one column go into the same sum, and a value that moves
    along either changes two sums.
    """
    num_rows, num_bytes = weight.shape[0], weight.shape[1] * weight.element_size()
    size = math.gcd(8, num_bytes, weight.storage_offset() * weight.element_size())
    words = weight.detach().view(-1).view(_WORDS[size])
    n = max(num_rows, num_bytes // size) + 1
    while math.gcd(n, num_bytes // size) > 1:
        n += 1
    whole = len(words) // (_AT_ONCE * n) * _AT_ONCE * n
    sums = words[:whole].view(-1, _AT_ONCE, n).sum(1).sum(0)
    for rest in torch.split(words[whole:], n):
        sums[: len(rest)] += rest
    return sums
