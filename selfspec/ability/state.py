"""The state of a model as one value: all that a verdict on it, or a capture of it, depends on.

What is not in it, such as the values of weights, must not decide on a verdict. Knows modules; runs
nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from selfspec.ability.user_code import ForeignCode, foreign_code
from selfspec.compat.generation import state_of_config
from selfspec.compat.modules import hooks_on, is_of_one_call, modules_of
from selfspec.compat.states import bounds_time_steps
from selfspec.forward.model import device_of
from selfspec.weights.fingerprint import contents_of, is_offloaded


class State(NamedTuple):
    """What a model is like now, as a value that changes with how its forward is computed.

    Whole numbers and tensors of foreign code are not in it, which its user has vouched for.
    """

    settings: Hashable
    modules: Hashable
    foreign: tuple[ForeignCode, ...]


def state_of(model: PreTrainedModel) -> State:
    device, config = device_of(model).type, model.config
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    autocast = torch.get_autocast_dtype(device) if has_autocast else None
    settings = [autocast, _float32_precision(), state_of_config(config, device)]
    if (of_text := config.get_text_config(decoder=True)) is not config:
        settings.append(state_of_config(of_text, device))
    modules = modules_of(model)
    return State(tuple(settings), modules.state, foreign_code(model, modules))


def _float32_precision() -> Hashable:
    """How products of float32 are computed.

    From torch 2.9 on, each backend has a setting of its own, and the one for all raises an error
    where they differ.
    """
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return torch.get_float32_matmul_precision()
    of_products = backends.cuda.matmul, backends.mkldnn.matmul
    of_convolutions = backends.cudnn.conv, backends.mkldnn.conv
    return tuple(part.fp32_precision for part in (*of_products, *of_convolutions))


def state_for_replays(model: PreTrainedModel) -> Hashable:
    """A value that changes with what a capture has taken from Python, or reads without asking."""
    addresses = tuple(
        _address(tensor)
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )
    return state_of(model), _whole_numbers(model), addresses


def state_of_kv(model: PreTrainedModel) -> Hashable | str:
    """A value that changes with what keys and values depend on; or why nobody knows that.

    Reads all weights, which takes a part of a plain step's time.
    """
    state = state_of(model)
    if state.foreign:
        return "hooks or code of others run in the model, and keys and values may depend on them"
    if bounds_time_steps(model):
        return "its prompts bound the time steps of running states, and plain steps do not"
    if model.training:
        return "the model is in training mode"
    if is_offloaded(model):
        return "its weights are moved about, so that nobody sees whether they have changed"
    return state, _whole_numbers(model), contents_of(model)


def has_adapters_of_one_call(model: PreTrainedModel) -> bool:
    """Has PEFT put hooks into the model that choose adapters for this call alone?"""
    hooks = (hook for module in model.modules() for hook in hooks_on(module).values())
    return any(map(is_of_one_call, hooks))


def _whole_numbers(model: PreTrainedModel) -> tuple[int, ...]:
    """Those on modules: how many experts a token gets, or counts of calls."""
    of_modules = (vars(module).values() for module in model.modules())
    return tuple(value for values in of_modules for value in values if type(value) is int)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Some quantised weights consist of several tensors.
        return id(tensor)
