"""What the weights and buffers of a model are now, as a value that changes with their contents."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from itertools import count
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from selfspec.compat.modules import num_writes
from selfspec.weights.held_weight import HeldWeight

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_AT_ONCE = 8  # Rows of words that are added up in one operation; fewer take longer than to read.
_numbers = WeakIdKeyDictionary()
_counter = count()


class Fingerprint(NamedTuple):
    """What a tensor is now: another value shows that it was replaced or written.

    Torch does not count writes through `.data`, so sums over the tensor's contents belong to it. To
    add up all weights of a model takes a part of a plain step's time.
    """

    address: int
    num_writes: int  # as torch has seen them
    layout: tuple[object, ...]
    contents: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Fingerprint:
        """The fingerprint of a strided tensor that has values."""
        layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        sums = _word_sums(_matrix_of(tensor)).cpu().numpy().tobytes()
        return cls(tensor.data_ptr(), num_writes(tensor), layout, sums)


def contents_of(tensors: Iterable[torch.Tensor]) -> tuple[Hashable, ...]:
    """The fingerprints of weights and buffers: what was computed with others is out of date."""
    return tuple(map(_fingerprint, tensors))


def is_offloaded(tensors: Iterable[torch.Tensor]) -> bool:
    """Are weights elsewhere until their layer computes, as those that accelerate moves?"""
    return any(x.is_meta for x in tensors if not isinstance(x, HeldWeight))


def _fingerprint(tensor: torch.Tensor) -> Hashable:
    if isinstance(tensor, HeldWeight):  # Nobody can write to it, unless it is given back.
        return _number_of(getattr(tensor, "packed", None) or tensor)
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or not tensor.numel():  # Such as a weight in 4 bits.
        return _address_of(tensor), num_writes(tensor)
    return Fingerprint.of(tensor)


def _address_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Some quantised weights consist of several tensors.
        return _number_of(tensor)


def _number_of(value: object) -> int:
    """A number that no other value gets, also after this one is gone."""
    if value not in _numbers:
        _numbers[value] = next(_counter)
    return int(_numbers[value])


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
