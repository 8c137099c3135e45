"""One model's runner of captured forwards, which is kept from call to call.

It serves one call at a time. If the model has changed, a new runner is made. Each runner is tried
before its first use, which shows whether the model does something that no capture can follow.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from selfspec.machine.device import device_for
from selfspec.machine.memory import free_memory
from selfspec.run.experts import decode_mode
from selfspec.run.graphs.backend import GraphBackend
from selfspec.run.graphs.runner import StaticRunner, has_more_free
from selfspec.run.model import AttentionTypes
from selfspec.run.probe import try_backend
from selfspec.run.rope import changing_rope

__all__ = ["KeptRunner"]

_WIDEST_TRIED = 8
# Hooks from these modules act only in the prompt's forward, or only if a caller wants outputs.
_HARMLESS_HOOKS = ("selfspec.", "transformers.utils.output_capturing")
_ADAPTER_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class KeptRunner:
    """A runner for the present state of a model, or why there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: Hashable = None
        self._found: StaticRunner | str = ""
        self._free_then: int | None = None  # Bytes that were free when memory ran out.

    @contextmanager
    def borrow(self, model: Any, attention: AttentionTypes) -> Iterator[StaticRunner | str]:
        """Yields the runner for one call, or why that call can't have it."""
        if not self._lock.acquire(blocking=False):
            yield "another call is using this model's fixed KV slots"
            return
        try:
            yield _capture_reason(model, attention) or self._fresh(model, attention)
        finally:
            self._lock.release()

    def _fresh(self, model: Any, attention: AttentionTypes) -> StaticRunner | str:
        """The result of an earlier trial if the model has not changed since, else of a new one."""
        state = _capture_state(model)
        if state != self._state or has_more_free(model.device, self._free_then):
            # This frees the old runner before there is a new one.
            self._state, self._found, self._free_then = None, "", None
            self._found = _tried(model, attention)
            self._state = state
        if isinstance(self._found, StaticRunner):
            self._found.widen()
            if self._found.reason is not None:
                # Without graphs, eager forwards are faster than those over fixed slots.
                self._free_then, self._found = self._found.free_then, self._found.reason
        return self._found


def _tried(model: Any, attention: AttentionTypes) -> StaticRunner:
    """A runner, with a reason if its forwards don't give right results."""
    runner = StaticRunner(attention, device_for(model.device, overlap=False), model.device)

    def new_backend(model: Any, *args: Any, **kwargs: Any) -> GraphBackend:
        return GraphBackend(model, runner, *args, **kwargs, widest=_WIDEST_TRIED)

    try:
        with decode_mode(model):
            reason = try_backend(model, attention, new_backend)
    except torch.OutOfMemoryError:
        reason, runner.free_then = "there is no memory to try it", free_memory(model.device)
    runner.reason = runner.reason or reason
    return runner


def _capture_reason(model: Any, attention: AttentionTypes) -> str | None:
    """Why a forward of this model can't be replayed as a graph; None if no reason shows.

    Some reasons don't show here, such as experts that are chosen on the CPU; only a trial finds
    those. Costs some µs per module.
    """
    if attention.scale_period:
        return "it scales its queries by their column in the KV"
    if kind := changing_rope(model.config):
        return f"its {kind} rotary embedding changes with the length of a forward"
    if getattr(model, "_device_mesh", None) is not None or getattr(model, "_tp_size", None):
        return "it is spread over several processes"
    if torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks:
        return "all modules have forward hooks, which a replay would leave out"
    return _module_reason(model)


def _capture_state(model: Any) -> Hashable:
    """A value that changes when an earlier capture no longer computes the model's forward.

    It covers the addresses of the weights and what switches the model's code. Costs some µs per
    module.
    """
    kind = model.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    configs = (model.config, model.config.get_text_config(decoder=True))
    implementations = tuple(
        getattr(config, name, None)
        for config in configs
        for name in ("_attn_implementation", "_experts_implementation")
    )
    precision = torch.get_float32_matmul_precision()
    modules = tuple(part for module in model.modules() for part in _module_state(module))
    return autocast, precision, implementations, modules


def _module_reason(model: Any) -> str | None:
    devices = set()
    for name, module in model.named_modules():
        own = vars(module)
        if "_hf_hook" in own:
            return "accelerate's hooks move its tensors about"
        if own.get("_compiled_call_impl") or hasattr(
            own.get("forward"), "_torchdynamo_orig_callable"
        ):
            return "torch.compile runs it, which may make graphs of its own"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(getattr(hook, "__module__", "").startswith(_HARMLESS_HOOKS) for hook in hooks):
            where = f"its module {name!r}" if name else "it"
            return f"{where} has forward hooks, which a replay would leave out"
        devices |= {
            str(tensor.device) for tensor in module._parameters.values() if tensor is not None
        }
    return f"it is spread over {', '.join(sorted(devices))}" if len(devices) > 1 else None


def _module_state(module: Any) -> Iterator[Hashable]:
    own = vars(module)
    yield module.training
    if "forward" in own:
        yield id(own["forward"])
    if "merged_adapters" in own:
        yield repr([own.get(name) for name in _ADAPTER_SWITCHES])
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                yield _address(tensor), tensor.dtype


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Some quantised weights consist of several tensors.
        return id(tensor)
