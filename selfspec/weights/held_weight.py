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

STREAMED = (
    "the weights of a streamed model can't be written, trained or compiled, nor adapters be merged "
    "into them: each forward has what the files hold; edit the model and save it, or load it "
    "without max_memory"
)

_log = logging.getLogger("selfspec")

# A function of torch, and what it is called with.
_Function = Callable[..., Any]
_Args = tuple[Any, ...]
_Options = Mapping[str, Any]

_PARAMETER: Any = nn.Parameter  # torch types few of its special methods
_TENSOR: Any = torch.Tensor
_DATA: Any = _TENSOR.data  # `__torch_function__` is given its getter and its setter.

# Functions that tell nothing of a weight's values.
_ATTRIBUTES = "device dtype grad grad_fn is_leaf is_meta layout nbytes ndim requires_grad shape"
_METHODS = "__len__ dim element_size is_complex is_floating_point nelement numel size"
_CONVERSIONS = "to cpu float double half bfloat16"
# Torch names functions that write `…_` and `__i…__`. These are named so and don't write.
_HARMLESS = frozenset(("__index__", "__invert__"))
_WRITERS = frozenset((_TENSOR.__setitem__, _DATA.__set__))
_GIVE_MEMORY = frozenset((_TENSOR.storage, _TENSOR.untyped_storage, _DATA.__get__))

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
        """What code that reads the weight gets."""
        return self


class FileWeight(HeldWeight):
    """A streamed weight: it has its values only while its layer computes, and reads as NaN else."""

    kept = STREAMED


class PackedWeight(HeldWeight):
    """The weight of a layer that is held in a packed format alone.

    It has the weight's shape and device, and takes no memory but that of the packed matrix. If
    `torch.func` is given the weight itself, torch asks this class nothing, and computes from NaN.
    """

    packed: PackedMatrix | None  # None once it was given back.
    like: tuple[torch.dtype, int]  # The dtype and the columns; torch is slow to say them.

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        packed: PackedMatrix,
        kept: str | None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """What takes the place of a weight, in its dtype or another one."""
        made = nn.Parameter(_blank(weight, dtype), requires_grad=False)
        hold(made, packed, kept)
        return made  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.kept is not None and self.packed is not None:
            return PackedWeight.of(self, self.packed, self.kept)
        give_back(self)
        return _PARAMETER.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        if self.kept is not None:
            return _unpickled, (_PARAMETER(self.values(), requires_grad=False),)
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


def is_packed_in_place(module: nn.Module) -> bool:
    return type(getattr(module, "weight", None)) is PackedWeight


def set_data(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    """`weight.data = tensor`, also where others may not."""
    _as_torch_does(_DATA.__set__, (weight, tensor), {})


def _unpickled(weight: nn.Parameter) -> nn.Parameter:
    """An ordinary weight. Whoever unpickles it imports the attention that its model names."""
    return weight


def give_back(weight: PackedWeight, *, is_wanted: bool = False) -> None:
    """Makes an ordinary parameter of a weight that is not kept, unless another thread did.

    Other threads may compute from it, so it gets its values before it stops being packed. If nobody
    has said that this is wanted, the log says that it was done.
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
    for weight in _written(func, args, options):
        raise UnsupportedError(weight.kept)
    result = _as_torch_does(func, _values_in(args), _values_in(options))
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
_ANSWERS |= dict.fromkeys((getattr(_TENSOR, name) for name in _CONVERSIONS.split()), _converted)
_ANSWERS |= dict.fromkeys((getattr(_TENSOR, name) for name in _METHODS.split()), _as_torch_does)
for _name in _ATTRIBUTES.split():
    _ANSWERS[getattr(_TENSOR, _name).__get__] = _as_torch_does


def _written(func: _Function, args: _Args, options: _Options) -> Iterator[Any]:
    """The kept weights that a function of torch writes to, or whose memory it gives away."""
    name = getattr(func, "__name__", "")
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    writes = (is_in_place and name not in _HARMLESS) or func in _WRITERS or options.get("inplace")
    into = args[:1] or tuple(options.values()) if writes or func in _GIVE_MEMORY else ()
    return _held_in(into, options.get("out"))


def _held_in(*values: object) -> Iterator[Any]:
    """The held weights among the arguments of a function."""
    for value in values:
        if isinstance(value, HeldWeight):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _held_in(*value)
        elif isinstance(value, dict):
            yield from _held_in(*value.values())


def _values_in(value: Any) -> Any:
    """An argument of a function, with their values in place of held weights."""
    if isinstance(value, HeldWeight):
        return value.values()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_values_in, value))
    if isinstance(value, dict):
        return {name: _values_in(part) for name, part in value.items()}
    return value


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
