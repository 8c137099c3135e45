"""Keeps a model's runner of captured forwards from call to call.

The runner serves one call at a time. If the model has changed, a new runner is made. Each runner is
tried before its first use, which shows whether the model does something that can't be captured.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from selfspec.ability.families import changing_rope
from selfspec.ability.look import Look, look_at
from selfspec.ability.probe import try_backend
from selfspec.compat.generation import decoding_switches
from selfspec.compat.modules import is_parallel
from selfspec.cuda.runner import StaticRunner
from selfspec.forward.backends import TreeBackend
from selfspec.forward.model import AttentionTypes, device_of
from selfspec.forward.sizes import Limits, Policy
from selfspec.machine.device import device_for


class KeptRunner:
    """A runner for a model as it is now, or why there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: Hashable = None
        self._runner: StaticRunner | str = ""  # Or why there is none.

    @property
    def num_bytes(self) -> int:
        """Bytes that the runner keeps from call to call."""
        return self._runner.num_bytes if isinstance(self._runner, StaticRunner) else 0

    @contextmanager
    def borrow(
        self, look: Look, attention: AttentionTypes, limits: Limits | None
    ) -> Iterator[StaticRunner | str]:
        """Yields the runner for one call or session; or the reason why none can be lent."""
        if not self._lock.acquire(blocking=False):
            yield "another call is using this model's fixed KV slots"
            return
        try:
            runner = _capture_reason(look, attention) or self._fresh(look, attention)
            if isinstance(runner, StaticRunner):
                runner.kv.policy = Policy(limits, is_fixed=True)
            yield runner
        finally:
            self._lock.release()

    def _fresh(self, look: Look, attention: AttentionTypes) -> StaticRunner | str:
        """The result of an earlier trial if the model has not changed since, else of a new one."""
        if look.replay_key != self._state:
            # This frees the old runner before there is a new one.
            self._state, self._runner = None, ""
            try:
                self._runner = _tried(look.model, attention)
            except torch.OutOfMemoryError:
                return "there was no memory to try captured forwards"
            self._state = look_at(look.model).replay_key
        if isinstance(self._runner, StaticRunner) and self._runner.reason is not None:
            # Without graphs, eager forwards are faster than those over fixed slots.
            self._runner = self._runner.reason
        return self._runner


def _tried(model: Any, attention: AttentionTypes) -> StaticRunner:
    """A new runner; its `reason` is set if its forwards don't give right results."""
    runner = StaticRunner(attention, device_for(model.device), model.device)
    with decoding_switches(model):
        reason = try_backend(model, attention, partial(TreeBackend, captured=runner))
    runner.check_memory()
    runner.reason = runner.reason or reason
    return runner


def _capture_reason(look: Look, attention: AttentionTypes) -> str | None:
    """Why a forward of this model can't be replayed as a graph; None if no reason is found.

    Only a trial finds the other reasons, for example experts that are chosen on the CPU. Costs some
    µs per module.
    """
    model = look.model
    device = device_for(device_of(model))
    if not device.can_capture:
        return f"a {device.name} captures no graphs"
    if attention.scale_period:
        return "it scales its queries by their column in the KV"
    if rope := changing_rope(model.config):
        return f"its {rope} rotary embedding changes with the length of a forward"
    if is_parallel(model):
        return "it is spread over several processes"
    if foreign := look.foreign:
        return f"{foreign[0].what}, whose Python a replay would leave out"
    if any(look.compiled):
        return "torch.compile runs it, which may make graphs of its own"
    return look.scattered_reason()
