"""Weights that code outside must not write, since what it writes would be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from selfspec.errors import UnsupportedError

__all__ = [
    "STREAMED",
    "FileWeight",
    "HeldWeight",
    "read",
    "refuse_write",
    "set_data",
    "weights_in",
]

STREAMED = (
    "the weights of a streamed model can't be written, nor adapters be merged into them: each "
    "forward has what the files hold; edit the model and save it, or load it without max_memory"
)

_PARAMETER: Any = nn.Parameter  # torch types few of its special methods
_TENSOR: Any = torch.Tensor
_DATA: Any = _TENSOR.data  # Its getter and setter are what `__torch_function__` is given.
# They are named like functions that write, and the writers below are not.
_HARMLESS = frozenset(("requires_grad_", "__index__", "__invert__"))
_WRITERS = frozenset((_TENSOR.__setitem__, _DATA.__set__))
_GIVE_MEMORY = frozenset((_TENSOR.storage, _TENSOR.untyped_storage, _DATA.__get__))
Weight = TypeVar("Weight", bound=nn.Parameter)


class HeldWeight(nn.Parameter):
    """A weight whose values are elsewhere, so that its class answers functions of torch."""

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Torch does not ask the class about this one, which writes."""
        kind: Any = type(self)
        return kind.__torch_function__(_TENSOR.set_, (kind,), (self, *args), kwargs)


class FileWeight(HeldWeight):
    """A streamed weight: a layer has its values only while it computes.

    Reads as NaN in between. Whatever would write it, or asks for the memory to write to, is
    refused.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_write(cls, func, args, kwargs or {}, STREAMED)
        return read(func, types, args, kwargs or {}, STREAMED)


def refuse_write(
    kind: type[nn.Parameter], func: Callable[..., Any], args: Any, kwargs: Any, why: str
) -> None:
    """Raises if a function of torch writes to a weight of this kind, or gives away its memory."""
    name = getattr(func, "__name__", "")
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    writes = (is_in_place and name not in _HARMLESS) or func in _WRITERS or kwargs.get("inplace")
    into = args[:1] or tuple(kwargs.values()) if writes or func in _GIVE_MEMORY else ()
    if next(weights_in(kind, into, kwargs.get("out")), None) is not None:
        raise UnsupportedError(why)


def read(func: Callable[..., Any], types: Any, args: Any, kwargs: Any, why: str) -> Any:
    """What a function of torch reads of a weight that is kept.

    An array can't be written, since that would be lost. A module would put a weight on the device
    "meta", which has no values, in place of the weight.
    """
    found = _PARAMETER.__torch_function__(func, types, args, kwargs)
    if func is _TENSOR.to and found.is_meta:
        raise UnsupportedError(why)
    if isinstance(found, np.ndarray):
        found.flags.writeable = False
    return found


def weights_in(kind: type[Weight], *values: Any) -> Iterator[Weight]:
    """The weights of this kind among the arguments of a function."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from weights_in(kind, *value)
        elif isinstance(value, dict):
            yield from weights_in(kind, *value.values())


def set_data(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    """`weight.data = tensor`, also where others may not."""
    _PARAMETER.__torch_function__(_DATA.__set__, (), (weight, tensor), {})
