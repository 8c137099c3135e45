"""What functions of torch do with a tensor: tell nothing of its values, convert it, or write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_TENSOR: Any = torch.Tensor  # torch types few of its special methods

# Names of functions that tell nothing of a tensor's values.
ATTRIBUTES = "device dtype grad grad_fn is_leaf is_meta layout nbytes ndim requires_grad shape"
METHODS = "__len__ dim element_size is_complex is_floating_point nelement numel size"
CONVERSIONS = "to cpu float double half bfloat16"
# Torch names functions that write `…_` and `__i…__`. These are named so and don't write.
_HARMLESS = frozenset(("__index__", "__invert__"))
_WRITERS = frozenset((_TENSOR.__setitem__, _TENSOR.data.__set__))
_GIVE_MEMORY = frozenset((_TENSOR.storage, _TENSOR.untyped_storage, _TENSOR.data.__get__))


def written_by(
    func: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments that a function of torch writes to, or whose memory it gives away."""
    name = getattr(func, "__name__", "")
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    writes = (is_in_place and name not in _HARMLESS) or func in _WRITERS or options.get("inplace")
    into = args[:1] or tuple(options.values()) if writes or func in _GIVE_MEMORY else ()
    return *into, options.get("out")


def tensors_in(*values: object) -> Iterator[object]:
    """The arguments of a function, and what tuples, lists and dictionaries of them hold."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())
        else:
            yield value


def replaced_in(value: Any, replaced: Callable[[Any], Any]) -> Any:
    """An argument with all that `tensors_in` finds replaced."""
    if isinstance(value, (tuple, list)):
        return type(value)(replaced_in(part, replaced) for part in value)
    if isinstance(value, dict):
        return {name: replaced_in(part, replaced) for name, part in value.items()}
    return replaced(value)
