"""The state of a model as one value: all that a verdict on it, or a capture of it, depends on.

What is not in it, such as the values of weights, must not decide on a verdict. Also says where code
of other people runs in a model, since that may do anything. Knows modules; runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from selfspec.compat.generation import implementations_of, is_of_output_capturing
from selfspec.compat.modules import (
    has_moving_hook,
    hooks_of_all,
    hooks_on,
    is_compiled,
    is_of_one_call,
    state_of_modules,
)
from selfspec.run.model import device_of

__all__ = ["addresses_of", "foreign_code", "foreign_hooks", "has_adapters_of_one_call", "state_of"]

_SETTINGS = frozenset((bool, float, str, int, list, tuple, dict))  # The types of plain values.


def state_of(model: Any) -> Hashable:
    """A value that changes with what may change how a model's forward is computed."""
    kind = device_of(model).type
    return (
        _autocast(kind),
        torch.get_float32_matmul_precision(),
        tuple(map(_settings, {id(c): c for c in _configs(model)}.values())),
        tuple(_foreign(hooks_of_all())),
        state_of_modules(model, _is_harmless),
    )


def addresses_of(model: Any) -> Hashable:
    """Where the weights are, which captured forwards read without asking."""
    return tuple(
        _address(tensor)
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )


def foreign_hooks(model: Any) -> str | None:
    """Where a model has forward hooks that are not known to be harmless; None if nowhere."""
    if _foreign(hooks_of_all()):
        return "all modules have forward hooks"
    for name, module in model.named_modules():
        if _foreign(hooks_on(module)):
            return f"{_where(name)} has forward hooks"
    return None


def foreign_code(model: Any) -> str | None:
    """Where code runs that belongs neither to the classes of a model nor to selfspec.

    What accelerate and `torch.compile` put around a forward changes no result.
    """
    if hooks := foreign_hooks(model):
        return hooks
    for name, module in model.named_modules():
        if _own_forward(module) and not has_moving_hook(module) and not is_compiled(module):
            return f"{_where(name)} has a forward of its own"
    return None


def has_adapters_of_one_call(model: Any) -> bool:
    """Has PEFT put hooks into the model that choose adapters for this call alone?"""
    return any(is_of_one_call(h) for part in model.modules() for h in hooks_on(part).values())


def _autocast(kind: str) -> torch.dtype | None:
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _configs(model: Any) -> tuple[Any, Any]:
    return model.config, model.config.get_text_config(decoder=True)


def _settings(config: Any) -> Hashable:
    plain = [value for value in vars(config).values() if type(value) in _SETTINGS]
    return implementations_of(config), repr(plain)


def _foreign(hooks: dict[int, Callable[..., Any]]) -> list[int]:
    """The numbers of the hooks that are not known to be harmless."""
    return [number for number, hook in hooks.items() if not _is_harmless(hook)]


def _is_harmless(hook: Any) -> bool:
    """Is a hook ours, or does it act only if a caller wants hidden states or attentions?"""
    origin = getattr(hook, "__module__", None) or ""
    return origin.startswith("selfspec.") or is_of_output_capturing(origin)


def _own_forward(module: nn.Module) -> Any:
    """The forward that other code has given to this module; None if there is none."""
    forward = vars(module).get("forward")
    return None if forward is None or _is_harmless(forward) else forward


def _where(name: str) -> str:
    return f"its module {name!r}" if name else "it"


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Some quantised weights consist of several tensors.
        return id(tensor)
