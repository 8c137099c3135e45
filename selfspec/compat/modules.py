"""What torch, accelerate and PEFT keep on modules: hooks, compiled code, adapters, devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

# What `to()`, `float()`, `cuda()` and the like call on each module; there is no public hook.
MOVES = "_apply"

__all__ = [
    "MOVES",
    "adapter_state",
    "execution_device",
    "has_global_hooks",
    "has_moving_hook",
    "hooks_before",
    "hooks_behind",
    "inside_compiled",
    "is_compiled",
    "is_parallel",
    "num_writes",
    "prompt_learning",
]


def hooks_before(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """The hooks in front of a module's forward. torch has no public way to read them."""
    return tuple(module._forward_pre_hooks.values())


def hooks_behind(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """The hooks behind a module's forward."""
    return tuple(module._forward_hooks.values())


def prompt_learning(model: nn.Module) -> bool:
    """Does a PEFT wrapper put virtual tokens in front of the prompt?

    PEFT then replaces a method of the model inside by one of the wrapper's. Without this, the trial
    of the model would have to find it out.
    """
    override = vars(model).get("prepare_inputs_for_generation")
    adapter = getattr(getattr(override, "__self__", None), "active_peft_config", None)
    return bool(getattr(adapter, "is_prompt_learning", False))


def has_global_hooks() -> bool:
    """Are there forward hooks for all modules of the process?"""
    return bool(torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Is this module's forward run by `torch.compile`?

    Without the private marks, packed weights and captured graphs would be tried on compiled code.
    """
    forward = vars(module).get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def inside_compiled(model: Any) -> Any:
    """The model inside of what `torch.compile(model)` gives, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_parallel(model: Any) -> bool:
    """Is the model spread over several processes, as by `tp_plan=`?

    Without it, each process could choose its own width, and they would wait for each other for
    ever. So a rename here must be noticed: a test makes such a model.
    """
    marks = ("_device_mesh", "_tp_size")
    return any(getattr(model, name, None) is not None for name in marks)


def num_writes(tensor: torch.Tensor) -> int:
    """How often torch has seen a tensor being written in place.

    Always 0 for tensors of inference mode, for which torch does not count. Without the count, a
    weight that is written while a call runs would be noticed by the next call alone.
    """
    return 0 if tensor.is_inference() else tensor._version


def has_moving_hook(module: nn.Module) -> bool:
    """Has accelerate put a hook on the module, which may move its tensors about?"""
    return "_hf_hook" in vars(module)


def execution_device(model: nn.Module) -> torch.device | None:
    """The device on which accelerate runs an offloaded model; None if it does not."""
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None


def adapter_state(module: nn.Module) -> Hashable:
    """Which adapters of PEFT act in a layer, and how strongly; None if it has none."""
    if not hasattr(module, "merged_adapters"):
        return None
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    return repr([getattr(module, name, None) for name in names])
