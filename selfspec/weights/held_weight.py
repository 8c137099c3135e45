"""Weights whose values are elsewhere: in a packed format, or in a model's files.

Layers compute with them, and other code may read them. Code that would write them, which would be
lost, gets an error or an ordinary parameter in place of the weight.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import embedding, linear

from selfspec.compat.kernels import is_traced, is_transforming
from selfspec.errors import UnsupportedError
from selfspec.weights.formats import PackedMatrix
from selfspec.weights.torch_functions import (
    ATTRIBUTES,
    CONVERSIONS,
    METHODS,
    replaced_in,
    tensors_in,
    written_by,
)

_log = logging.getLogger("selfspec")

# A function of torch, and what it is called with.
_Function = Callable[..., Any]
_Args = tuple[Any, ...]
_Options = Mapping[str, Any]

_PARAMETER: Any = nn.Parameter  # torch types few of its special methods
_TENSOR: Any = torch.Tensor
_DATA: Any = _TENSOR.data  # `__torch_function__` is given its getter and its setter.

_giving_back = threading.Lock()


class HeldWeight(nn.Parameter):
    """What packed and streamed weights share: its class answers functions of torch.

    If `kept` is None, code that asks for the values makes it an ordinary parameter. Else such code
    gets a copy of them, and what would write is refused with `kept` as the message.
    """

    kept: str | None

    @classmethod
    def __torch_function__(
        cls, func: _Function, types: object, args: _Args = (), kwargs: _Options | None = None
    ) -> Any:
        return _ANSWERS.get(func, _with_values)(func, args, kwargs or {})

    def set_(self, *args: object, **kwargs: object) -> Any:
        """Torch does not ask the class about this one, which writes."""
        return _with_values(_TENSOR.set_, (self, *args), kwargs)

    def values(self) -> torch.Tensor:
        """The values that code gets when it reads the weight."""
        return self


class PackedWeight(HeldWeight):
    """The weight of a layer that is held in a packed format alone.

    It has the weight's shape and device, and takes no memory but that of the packed matrix. If
    `torch.func` is given the weight itself, torch asks this class nothing, and computes from NaN.
    """

    packed: PackedMatrix | None  # None once it was given back.
    like: tuple[torch.dtype, int]  # The dtype and the columns; torch is slow to say them.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.kept is not None and self.packed is not None:
            copy = _PARAMETER(_blank(self, None), requires_grad=False)
            hold(copy, self.packed, self.kept)
            return copy
        give_back(self)
        return _PARAMETER.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        if self.kept is not None:
            # By a function of ours, so that whoever unpickles it imports our attention.
            return _values_of, (_PARAMETER(self.values(), requires_grad=False),)
        give_back(self)
        return _PARAMETER.__reduce_ex__(self, protocol)

    def values(self) -> torch.Tensor:
        """The weight's values, made anew."""
        assert self.packed is not None
        if is_transforming():
            raise UnsupportedError(
                "torch.func and torch.jit can't be given packed weights; load the model with "
                "transformers' from_pretrained() for them"
            )
        if self.kept is not None:
            _say_that_it_is_a_copy()
        with torch.inference_mode(False), torch.no_grad():
            return self.packed.unpacked().to(self.dtype)


def hold(
    weight: nn.Parameter,
    packed: PackedMatrix,
    kept: str | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Lets a parameter hold its values in a packed format alone, in its dtype or another one.

    It stays the same object. So modules that share it share the packed matrix, and an optimizer
    that has it goes on with it once it was given back.
    """
    made: Any = weight
    made.packed, made.kept = packed, kept
    made.like = (dtype or weight.dtype, weight.shape[1])
    blank = _blank(weight, dtype)
    made.__class__ = PackedWeight  # Layers compute from the matrix before the values are gone.
    set_data(weight, blank)


def _blank(weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    blank = torch.full((), math.nan, dtype=dtype or weight.dtype, device=weight.device)
    return blank.expand(weight.shape)


def set_data(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    """`weight.data = tensor`, also where others may not."""
    _as_torch_does(_DATA.__set__, (weight, tensor), {})


def give_back(weight: PackedWeight, *, is_wanted: bool = False) -> None:
    """Makes an ordinary parameter of a weight that is not kept, unless another thread did.

    The weight gets its values before it stops being packed, since other threads may compute from
    it. The log says that it was given back unless that `is_wanted`.
    """
    with _giving_back:
        if weight.kept is None and weight.packed is not None:
            set_data(weight, weight.values())
            weight.packed = None
            weight.__class__ = _PARAMETER
            if not is_wanted:
                _say_that_it_was_given_back()


def _linear(func: _Function, args: _Args, options: _Options) -> Any:
    """`linear(x, weight, bias)` from a packed matrix, where that computes the same.

    Asks no method of the weight, whose class changes when another thread gives it back.
    """
    if len(args) < 2 or type(args[1]) is not PackedWeight:
        return _with_values(func, args, options)
    x, weight, packed = args[0], args[1], args[1].packed
    bias = args[2] if len(args) > 2 else options.get("bias")
    if packed is None or not _is_plain_product(x, bias, weight):
        return _with_values(func, args, options)
    if not x.numel():
        return x.new_empty(*x.shape[:-1], len(weight))
    return packed(x, bias) if x.dim() > 1 else packed(x[None], bias)[0]


def _embedding(func: _Function, args: _Args, options: _Options) -> Any:
    """`embedding(ids, weight)` from a matrix that gives single rows."""
    rows = getattr(getattr(args[1], "packed", None), "rows", None) if len(args) > 1 else None
    is_trained = torch.is_grad_enabled() and rows is not None and args[1].requires_grad
    if rows is None or is_trained or options.get("max_norm") is not None:
        return _with_values(func, args, options)
    return rows(args[0]).to(args[1].dtype)


def _is_plain_product(x: torch.Tensor, bias: torch.Tensor | None, weight: PackedWeight) -> bool:
    """Does a product want no gradients, no trace, and no other dtype than the weight's?"""
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    ):
        return False
    if is_traced() or torch.is_autocast_enabled("cpu"):
        return False
    return bool(x.dim()) and (x.dtype, x.shape[-1]) == weight.like


def _as_torch_does(func: _Function, args: _Args, options: _Options) -> Any:
    """The function's own result, for arguments that are taken as ordinary parameters."""
    return _PARAMETER.__torch_function__(func, (), args, options)


def _converted(func: _Function, args: _Args, options: _Options) -> Any:
    """A weight that is there already, and of that dtype, is not converted."""
    result = _as_torch_does(func, args, options)
    if result is args[0] or not isinstance(args[0], HeldWeight):
        return result
    if result.is_meta and args[0].kept is not None:
        raise UnsupportedError(args[0].kept)  # A module would lose the weight.
    return _with_values(func, args, options)


def _detached(func: _Function, args: _Args, options: _Options) -> Any:
    """`nn.Parameter(weight)` detaches a weight that was given back, and wants its class."""
    result = _with_values(func, args, options)
    is_kept = isinstance(args[0], HeldWeight)
    return result if is_kept else nn.Parameter(result, requires_grad=False)


def _with_other_data(func: _Function, args: _Args, options: _Options) -> Any:
    """`weight.data = weight` changes nothing."""
    if args[0] is args[1]:
        return _as_torch_does(func, args, options)
    return _with_values(func, args, options)


def _with_gradients(func: _Function, args: _Args, options: _Options) -> Any:
    """`weight.requires_grad_()`: what is kept gets no gradients, and says so."""
    weight, *wanted = (*args, *options.values())
    if not (wanted[0] if wanted else True):
        return _as_torch_does(func, args, options)
    if weight.kept is not None:
        raise UnsupportedError(weight.kept)
    return _with_values(func, args, options)


def _with_values(func: _Function, args: _Args, options: _Options) -> Any:
    """The function's result from values. Weights that are not kept become ordinary parameters."""
    for weight in _held_in(args, options):
        if weight.kept is None:
            give_back(weight)
    if next(_held_in(args, options), None) is None:
        return _as_torch_does(func, args, options)
    for weight in _held_in(written_by(func, args, options)):
        raise UnsupportedError(weight.kept)
    result = _as_torch_does(func, *(replaced_in(part, _values_of) for part in (args, options)))
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    return result


# What answers a function whose arguments include a held weight; all others get the values.
_ANSWERS: dict[Any, Callable[[_Function, _Args, _Options], Any]] = {
    linear: _linear,
    embedding: _embedding,
    _TENSOR.detach: _detached,
    _DATA.__set__: _with_other_data,
    _TENSOR.requires_grad_: _with_gradients,
    _TENSOR.requires_grad.__set__: _with_gradients,
}
_ANSWERS |= dict.fromkeys((getattr(_TENSOR, name) for name in CONVERSIONS.split()), _converted)
_ANSWERS |= dict.fromkeys((getattr(_TENSOR, name) for name in METHODS.split()), _as_torch_does)
for _name in ATTRIBUTES.split():
    _ANSWERS[getattr(_TENSOR, _name).__get__] = _as_torch_does


def _held_in(*values: object) -> Iterator[Any]:
    """The held weights among the arguments of a function."""
    return (value for value in tensors_in(*values) if isinstance(value, HeldWeight))


def _values_of(value: Any) -> Any:
    return value.values() if isinstance(value, HeldWeight) else value


# Once in a process, since code such as `save_pretrained()` reads all weights one by one.
@cache
def _say_that_it_was_given_back() -> None:
    _log.warning("other code reads weights that were packed, so they are ordinary ones again")


@cache
def _say_that_it_is_a_copy() -> None:
    _log.warning(
        "code reads weights that are held in packed form: it gets, and saves, copies, with the "
        "values of rounded weights; what it writes to a copy is lost"
    )
