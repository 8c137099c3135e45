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

from selfspec.compat.generation import (
    decoding_switches,
    implementations_of,
    is_of_output_capturing,
)
from selfspec.compat.modules import (
    adapter_state,
    has_global_hooks,
    has_moving_hook,
    hooks_before,
    hooks_behind,
    is_compiled,
    is_parallel,
)
from selfspec.machine.device import device_for
from selfspec.run.graphs.backend import GraphBackend
from selfspec.run.graphs.runner import StaticRunner
from selfspec.run.model import AttentionTypes
from selfspec.run.probe import try_backend
from selfspec.run.rope import changing_rope

__all__ = ["KeptRunner"]

_WIDEST_TRIED = 8


class KeptRunner:
    """A runner for the present state of a model, or why there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: Hashable = None
        self._found: StaticRunner | str = ""

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
        if state != self._state:
            # This frees the old runner before there is a new one.
            self._state, self._found = None, ""
            self._found = _tried(model, attention)
            self._state = state
        if isinstance(self._found, StaticRunner) and self._found.reason is not None:
            # Without graphs, eager forwards are faster than those over fixed slots.
            self._found = self._found.reason
        return self._found


def _tried(model: Any, attention: AttentionTypes) -> StaticRunner:
    """A runner, with a reason if its forwards don't give right results."""
    runner = StaticRunner(attention, device_for(model.device, overlap=False), model.device)

    def new_backend(model: Any, *args: Any, **kwargs: Any) -> GraphBackend:
        return GraphBackend(model, runner, *args, **kwargs, widest=_WIDEST_TRIED)

    try:
        with decoding_switches(model):
            reason = try_backend(model, attention, new_backend)
    except torch.OutOfMemoryError:
        reason = "there is no memory to try it"
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
    if is_parallel(model):
        return "it is spread over several processes"
    if has_global_hooks():
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
    implementations = tuple(map(implementations_of, configs))
    precision = torch.get_float32_matmul_precision()
    modules = tuple(part for module in model.modules() for part in _module_state(module))
    return autocast, precision, implementations, modules


def _module_reason(model: Any) -> str | None:
    devices = set()
    for name, module in model.named_modules():
        if has_moving_hook(module):
            return "accelerate's hooks move its tensors about"
        if is_compiled(module):
            return "torch.compile runs it, which may make graphs of its own"
        if not all(map(_is_harmless, (*hooks_before(module), *hooks_behind(module)))):
            where = f"its module {name!r}" if name else "it"
            return f"{where} has forward hooks, which a replay would leave out"
        devices |= {str(tensor.device) for tensor in module.parameters(recurse=False)}
    return f"it is spread over {', '.join(sorted(devices))}" if len(devices) > 1 else None


def _is_harmless(hook: Any) -> bool:
    """Does a hook act only in the prompt's forward, or only if a caller wants outputs?"""
    origin = getattr(hook, "__module__", "")
    return origin.startswith("selfspec.") or is_of_output_capturing(origin)


def _module_state(module: Any) -> Iterator[Hashable]:
    own = vars(module)
    yield module.training
    if "forward" in own:
        yield id(own["forward"])
    yield adapter_state(module)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        yield _address(tensor), tensor.dtype


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Some quantised weights consist of several tensors.
        return id(tensor)
