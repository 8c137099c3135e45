"""One look at a model: what it is like now, in one walk over its modules.

Whoever decides on a call reads the same `Look`. What is not in it, such as the values of weights,
must not decide on a verdict. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.ability.user_code import ForeignCode, foreign_code
from selfspec.compat.generation import state_of_config
from selfspec.compat.modules import (
    Modules,
    has_moving_hook,
    hooks_on,
    is_compiled,
    is_of_one_call,
    modules_of,
)
from selfspec.compat.states import bounds_time_steps
from selfspec.forward.model import device_of
from selfspec.weights.fingerprint import contents_of, is_offloaded


@dataclass(frozen=True, eq=False)
class Look:
    """What a model was like when a prompt came.

    Three keys say whether it is still the same: `verdict_key` for what it can verify, `replay_key`
    for captured forwards, and `kv_key` for keys and values.
    """

    model: PreTrainedModel
    modules: Modules
    foreign: tuple[ForeignCode, ...]
    # Changes with how a forward is computed. Whole numbers and tensors of foreign code are not in
    # it, which its user has vouched for.
    verdict_key: Hashable

    @property
    def replay_key(self) -> Hashable:
        """Changes with what a capture has taken from Python, or reads without asking."""
        addresses = tuple(map(_address, self.modules.tensors))
        return self.verdict_key, self.modules.whole_numbers, addresses

    def kv_key(self) -> Hashable | str:
        """Changes with what keys and values depend on; or why nobody knows that.

        Reads all weights, which takes a part of a plain step's time.
        """
        if self.foreign:
            return (
                "hooks or code of others run in the model, and keys and values may depend on them"
            )
        if bounds_time_steps(self.modules.all):
            return "its prompts bound the time steps of running states, and plain steps do not"
        if self.model.training:
            return "the model is in training mode"
        if is_offloaded(self.modules.tensors):
            return "its weights are moved about, so that nobody sees whether they have changed"
        return self.verdict_key, self.modules.whole_numbers, contents_of(self.modules.tensors)

    @property
    def has_adapters_of_one_call(self) -> bool:
        """Has PEFT put hooks into the model that choose adapters for this call alone?"""
        hooks = (hook for _, module in self.modules.hooked for hook in hooks_on(module).values())
        return any(map(is_of_one_call, hooks))

    @property
    def compiled(self) -> Iterator[nn.Module]:
        """The modules that torch compiles, the whole model among them."""
        return filter(is_compiled, self.modules.all)

    def scattered_reason(self) -> str | None:
        """Why the tensors of a forward do not stay on one device; None if they do."""
        if any(map(has_moving_hook, self.modules.all)):
            return "accelerate's hooks move its tensors about"
        weights = (x for x in self.modules.tensors if isinstance(x, nn.Parameter))
        devices = sorted({str(weight.device) for weight in weights})
        return f"it is spread over {', '.join(devices)}" if len(devices) > 1 else None


def look_at(model: PreTrainedModel) -> Look:
    """Takes some µs for each module."""
    device, config = device_of(model).type, model.config
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    autocast = torch.get_autocast_dtype(device) if has_autocast else None
    settings = [autocast, _float32_precision(), state_of_config(config, device)]
    if (of_text := config.get_text_config(decoder=True)) is not config:
        settings.append(state_of_config(of_text, device))
    modules = modules_of(model)
    foreign = foreign_code(model, modules)
    return Look(model, modules, foreign, (tuple(settings), modules.state, foreign))


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


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Some quantised weights consist of several tensors.
        return id(tensor)
