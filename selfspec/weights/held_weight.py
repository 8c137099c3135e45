"""Weights whose values are elsewhere: in a packed format, or in a model's files.

Layers compute with them, and other code may read them. Code that would write them, which would be
lost, gets an error or an ordinary parameter in place of the weight.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import embedding, linear

from selfspec.errors import UnsupportedError
from selfspec.weights.formats import PackedMatrix

STREAMED = (
    "the weights of a streamed model can't be written, nor adapters be merged into them: each "
    "forward has what the files hold; edit the model and save it, or load it without max_memory"
)

_log = logging.getLogger("selfspec")

_PARAMETER: Any = nn.Parameter  # torch types few of its special methods
_TENSOR: Any = torch.Tensor
_DATA: Any = _TENSOR.data  # `__torch_function__` is given its getter and its setter.

# Functions that tell nothing of a weight's values.
_ATTRIBUTES = "device dtype grad grad_fn is_leaf is_meta layout nbytes ndim requires_grad shape"
_METHODS = "__len__ dim element_size is_complex is_floating_point nelement numel size"
_OF_NO_VALUES = frozenset(
    (
        *(getattr(_TENSOR, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(_TENSOR, name) for name in _METHODS.split()),
    )
)
_CONVERSIONS = "to cpu float double half bfloat16"
_MOVES = frozenset(getattr(_TENSOR, name) for name in _CONVERSIONS.split())
# Torch names functions that write `…_` and `__i…__`. The harmless ones are named so and don't
# write; the writers write and are not named so.
_HARMLESS = frozenset(("requires_grad_", "__index__", "__invert__"))
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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (linear, embedding) and len(args) > 1 and type(args[1]) is PackedWeight:
            outcome = _computed(func, args[0], args[1], args, kwargs)
            if outcome is not None:
                return outcome
        if func in _OF_NO_VALUES or (func == _DATA.__set__ and args[0] is args[1]):
            return _as_torch_does(func, args, kwargs)
        if func in _MOVES and _as_torch_does(func, args, kwargs) is args[0]:
            return args[0]  # It is there, and of that dtype.
        for weight in _held_in(args, kwargs):
            if weight.kept is None:
                _give_back(weight)
        kept = next((weight.kept for weight in _held_in(args, kwargs)), None)
        _refuse_write(func, args, kwargs)
        outcome = _as_torch_does(func, _with_values(args), _with_values(kwargs))
        if kept is None and func == _TENSOR.detach:  # `nn.Parameter(weight)` wants its own class.
            return nn.Parameter(outcome, requires_grad=False)
        if kept is not None and func is _TENSOR.to and outcome.is_meta:
            raise UnsupportedError(kept)  # A module would lose the weight for one without values.
        if kept is not None and isinstance(outcome, np.ndarray):
            outcome.flags.writeable = False
        return outcome

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Torch does not ask the class about this one, which writes."""
        own_type: Any = type(self)
        return own_type.__torch_function__(_TENSOR.set_, (own_type,), (self, *args), kwargs)

    def values(self) -> torch.Tensor:
        """What code that reads the weight gets."""
        return self


class FileWeight(HeldWeight):
    """A streamed weight: it has its values only while its layer computes, and reads as NaN else."""

    kept = STREAMED


class PackedWeight(HeldWeight):
    """The weight of a layer that is held in a packed format alone.

    It has the weight's shape and device, and takes no memory but that of the packed matrix.
    """

    packed: PackedMatrix | None  # None once it was given back.
    like: tuple[torch.dtype, int]  # Its dtype and its columns. To ask torch for them takes longer.

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        packed: PackedMatrix,
        kept: str | None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """What takes the place of a weight, in its dtype or another one."""
        blank = torch.full((), math.nan, dtype=dtype or weight.dtype, device=weight.device)
        made = cls(blank.expand(weight.shape), requires_grad=False)
        made.packed, made.kept = packed, kept
        made.like = (dtype or weight.dtype, weight.shape[1])
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.kept is not None and self.packed is not None:
            return PackedWeight.of(self, self.packed, self.kept)
        _give_back(self)
        return _PARAMETER.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.kept is not None:
            return _unpickled, (_PARAMETER(self.values(), requires_grad=False),)
        _give_back(self)
        return _PARAMETER.__reduce_ex__(self, protocol)

    def values(self) -> torch.Tensor:
        """The weight's values, made anew."""
        assert self.packed is not None
        if self.kept is not None:
            _say_that_it_is_a_copy()
        with torch.inference_mode(False), torch.no_grad():
            return self.packed.unpacked().to(self.dtype)


def gives_rows(weight: torch.Tensor) -> bool:
    """Can an embedding read single rows of this weight, without making all its values anew?"""
    return type(weight) is nn.Parameter or hasattr(getattr(weight, "packed", None), "rows")


def is_packed_in_place(module: nn.Module) -> bool:
    return type(getattr(module, "weight", None)) is PackedWeight


def set_data(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    """`weight.data = tensor`, also where others may not."""
    _as_torch_does(_DATA.__set__, (weight, tensor), {})


def _unpickled(weight: nn.Parameter) -> nn.Parameter:
    """An ordinary weight. Whoever unpickles it imports the attention that its model names."""
    return weight


def _give_back(weight: PackedWeight) -> None:
    """Makes an ordinary parameter of a weight that is not kept, unless another thread did.

    Other threads may compute from it, so it gets its values before it stops being packed.
    """
    with _giving_back:
        if weight.kept is None and weight.packed is not None:
            set_data(weight, weight.values())
            weight.packed = None
            weight.__class__ = _PARAMETER


def _computed(
    func: Any, x: torch.Tensor, weight: PackedWeight, args: Any, kwargs: Any
) -> torch.Tensor | None:
    """What `linear` or `embedding` gives, from the packed matrix; None if that can't tell.

    Asks no method of the weight, whose class changes when another thread gives it back.
    """
    packed = weight.packed
    if func is embedding:
        rows = getattr(packed, "rows", None)
        if rows is None or kwargs.get("max_norm") is not None:
            return None
        return rows(x).to(weight.dtype)  # type: ignore[no-any-return]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if packed is None or not _is_plain_product(x, bias, weight.like):
        return None
    if not x.numel():
        return x.new_empty(*x.shape[:-1], len(weight))
    return packed(x, bias) if x.dim() > 1 else packed(x[None], bias)[0]


def _is_plain_product(
    x: torch.Tensor, bias: torch.Tensor | None, like: tuple[torch.dtype, int]
) -> bool:
    """Does a product want neither gradients nor another dtype than the weight's?"""
    has_gradient = x.requires_grad or (bias is not None and bias.requires_grad)
    if has_gradient and torch.is_grad_enabled():
        return False
    return bool(x.dim()) and (x.dtype, x.shape[-1]) == like and not torch.is_autocast_enabled("cpu")


def _as_torch_does(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The function's own result, for arguments that are taken as ordinary parameters."""
    return _PARAMETER.__torch_function__(func, (), args, kwargs)


def _refuse_write(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raises if a function of torch writes to a kept weight, or gives away its memory."""
    name = getattr(func, "__name__", "")
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    writes = (is_in_place and name not in _HARMLESS) or func in _WRITERS or kwargs.get("inplace")
    into = args[:1] or tuple(kwargs.values()) if writes or func in _GIVE_MEMORY else ()
    for weight in _held_in(into, kwargs.get("out")):
        raise UnsupportedError(weight.kept)


def _held_in(*values: Any) -> Iterator[Any]:
    """The held weights among the arguments of a function."""
    for value in values:
        if isinstance(value, HeldWeight):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _held_in(*value)
        elif isinstance(value, dict):
            yield from _held_in(*value.values())


def _with_values(value: Any) -> Any:
    """An argument of a function, with their values in place of held weights."""
    if isinstance(value, HeldWeight):
        return value.values()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_with_values, value))
    if isinstance(value, dict):
        return {name: _with_values(part) for name, part in value.items()}
    return value


@cache
def _say_that_it_is_a_copy() -> None:
    """Once in a process, since code such as `save_pretrained()` reads all weights one by one."""
    _log.warning(
        "code reads weights that are held in packed form: it gets, and saves, copies, with the "
        "rounded values of weights in 8 bits; what it writes to a copy is lost"
    )
