"""The state of a model as one value: all that a verdict on it, or a capture of it, depends on.

What is not in it, such as the values of weights, must not decide on a verdict. Knows modules; runs
nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from selfspec.ability.user_code import foreign_code
from selfspec.compat.generation import implementations_of, settings_of
from selfspec.compat.modules import hooks_on, is_of_one_call, state_of_modules
from selfspec.compat.states import bounds_time_steps
from selfspec.forward.model import device_of
from selfspec.weights.copies import contents_of, is_offloaded

_SETTINGS = frozenset((bool, float, str, int, list, tuple, dict))  # The types of plain values.


def state_of(model: Any) -> Hashable:
    """A value that changes with what may change how a model's forward is computed.

    Whole numbers and tensors of foreign code are not in it, which its user has vouched for.
    """
    kind, configs = (
        device_of(model).type,
        (model.config, model.config.get_text_config(decoder=True)),
    )
    return (
        _autocast(kind),
        torch.get_float32_matmul_precision(),
        tuple(_settings(each, kind) for each in {id(c): c for c in configs}.values()),
        state_of_modules(model),
        tuple(code.code for code in foreign_code(model)),
    )


def state_for_replays(model: Any) -> Hashable:
    """A value that changes with what a capture has taken from Python, or reads without asking."""
    addresses = tuple(
        _address(tensor)
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )
    return state_of(model), _whole_numbers(model), addresses


def state_of_kv(model: Any) -> Hashable | str:
    """A value that changes with what keys and values depend on; or why nobody knows that.

    Reads all weights, which takes a part of a plain step's time.
    """
    if foreign_code(model):
        return "hooks or code of others run in the model, and keys and values may depend on them"
    if bounds_time_steps(model):
        return "its prompts bound the time steps of running states, and plain steps do not"
    if model.training:
        return "the model is in training mode"
    if is_offloaded(model):
        return "its weights are moved about, so that nobody sees whether they have changed"
    return state_of(model), _whole_numbers(model), contents_of(model)


def has_adapters_of_one_call(model: Any) -> bool:
    """Has PEFT put hooks into the model that choose adapters for this call alone?"""
    return any(is_of_one_call(h) for part in model.modules() for h in hooks_on(part).values())


def _autocast(kind: str) -> torch.dtype | None:
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _settings(config: Any, device: str) -> Hashable:
    plain = [value for value in settings_of(config).values() if type(value) in _SETTINGS]
    return implementations_of(config, device), repr(plain)


def _whole_numbers(model: Any) -> tuple[int, ...]:
    """Those on modules: how many experts a token gets, or counts of calls."""
    held = (vars(module).values() for module in model.modules())
    return tuple(value for values in held for value in values if type(value) is int)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Some quantised weights consist of several tensors.
        return id(tensor)
