"""Keeps a model's runner of captured forwards from call to call.

The runner serves one call at a time. If the model has changed, a new runner is made. Each runner is
tried before its first use, which shows whether the model does something that can't be captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from selfspec.ability.probe import BrokenTrial, try_backend
from selfspec.ability.rope import changing_rope
from selfspec.ability.state import state_for_replays, state_of
from selfspec.compat.generation import decoding_switches
from selfspec.compat.kernels import is_out_of_memory
from selfspec.compat.modules import has_moving_hook, is_compiled, is_parallel
from selfspec.cuda.compiled import compile_layers
from selfspec.cuda.runner import StaticRunner
from selfspec.forward.backends import TreeBackend
from selfspec.forward.model import AttentionTypes, device_of
from selfspec.forward.pause import Pause
from selfspec.forward.sizes import Limits, Policy
from selfspec.forward.tree_kv import TreeKV
from selfspec.machine.device import device_for

# The calls after which a trial is made again for which there was no memory: at first, and at most.
_PAUSES = 1, 64
_COMPILING_PAUSES = 64, 4096  # The same for compiled layers, in steps.


class Shortage(NamedTuple):
    """There was no memory to try captured forwards. `again` does so over slots that hold rows."""

    reason: str
    again: Callable[[TreeKV], StaticRunner | str]

    def __str__(self) -> str:
        return self.reason


class _Loan(NamedTuple):
    """Which thread has borrowed a runner, and what for."""

    thread: int
    attention: AttentionTypes
    limits: Limits | None

    @property
    def policy(self) -> Policy:
        return Policy(self.limits, is_fixed=True)


class KeptRunner:
    """A runner for a model as it is now, or why there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: Hashable = None
        self._runner: StaticRunner | str = ""  # Or why there is none.
        self._trial = Pause(*_PAUSES)
        self._refused: str | None = None  # Why no layers are compiled, once that was wanted.
        self._compiling: Pause | None = None  # After which layers are tried again, if they are.
        self._loan: _Loan | None = None

    @property
    def num_bytes(self) -> int:
        """What the runner keeps from call to call."""
        return self._runner.num_bytes if isinstance(self._runner, StaticRunner) else 0

    @property
    def layers_reason(self) -> str | None:
        """Why layers are not compiled, or some of them are not; None if nobody wanted that."""
        layers = getattr(self._runner, "layers", None)
        return self._refused if layers is None else layers.reason

    @contextmanager
    def borrow(
        self, model: Any, attention: AttentionTypes, limits: Limits | None
    ) -> Iterator[StaticRunner | Shortage | str]:
        """Yields the runner for one call or session, or why that can't have it."""
        if not self._lock.acquire(blocking=False):
            yield "another call is using this model's fixed KV slots"
            return
        try:
            loan = _Loan(threading.get_ident(), attention, limits)
            runner = _capture_reason(model, attention) or self._fresh(model, loan)
            if isinstance(runner, StaticRunner):
                runner.kv.policy = loan.policy
                self._loan = loan
            yield runner
        finally:
            self._loan = None
            self._lock.release()

    def _fresh(self, model: Any, loan: _Loan) -> StaticRunner | Shortage | str:
        """The result of an earlier trial if the model has not changed since, else of a new one."""
        again = partial(self._over, model, loan)
        shortage = Shortage("there was no memory to try captured forwards", again)
        if state_for_replays(model) == self._state:
            return self._verdict
        if not self._trial.step():
            return shortage
        try:
            return self._try(model, loan.attention)
        except torch.OutOfMemoryError:
            self._trial.begin()
            return shortage

    def _over(self, model: Any, loan: _Loan, kv: TreeKV) -> StaticRunner | str:
        """A new trial in the midst of a call; the runner takes over the slots of its rows."""
        runner = self._try(model, loan.attention)
        if isinstance(runner, StaticRunner):
            kv.policy = loan.policy
            runner.take_over(kv)
            self._loan = loan
        return runner

    def _try(self, model: Any, attention: AttentionTypes) -> StaticRunner | str:
        """The result of a new trial; raises `torch.OutOfMemoryError` if there is none."""
        # This frees the old runner before there is a new one.
        self._state, self._runner, self._refused, self._compiling = None, "", None, None
        try:
            self._runner = _tried(model, attention)
        except BrokenTrial as broken:
            return str(broken)  # The next call tries again.
        self._state = state_for_replays(model)
        return self._verdict

    @property
    def _verdict(self) -> StaticRunner | str:
        if isinstance(self._runner, StaticRunner) and self._runner.reason is not None:
            # Without graphs, eager forwards are faster than those over fixed slots.
            self._runner = self._runner.reason
        return self._runner

    def compile(self, model: Any) -> None:
        """Compiles the layers of the runner that this thread has borrowed, between two forwards.

        Does nothing if they are compiled, or if an earlier attempt has shown that they can't be.
        """
        runner, loan, pause = self._runner, self._loan, self._compiling
        if loan is None or loan.thread != threading.get_ident() or isinstance(runner, str):
            return
        if runner.layers is not None or (self._refused and not (pause and pause.step())):
            return
        kv = runner.kv  # A trial has other slots, since these may hold rows.
        runner.take_over(TreeKV(loan.attention, loan.policy))
        try:
            self._refused = compile_layers(model, loan.attention, runner, loan.limits)
            self._compiling = None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._refused = "there was no memory to try them"
            self._compiling = pause or Pause(*_COMPILING_PAUSES)
            self._compiling.begin()
        finally:
            runner.take_over(kv)


def _tried(model: Any, attention: AttentionTypes) -> StaticRunner:
    """A new runner; its `reason` is set if its forwards don't give right results."""
    runner = StaticRunner(attention, device_for(model.device), model.device)
    with decoding_switches(model):
        reason = try_backend(model, attention, partial(TreeBackend, forwards=runner))
    runner.check_memory()
    runner.reason = runner.reason or reason
    return runner


def _capture_reason(model: Any, attention: AttentionTypes) -> str | None:
    """Why a forward of this model can't be replayed as a graph; None if no reason is found.

    Only a trial finds the other reasons, for example experts that are chosen on the CPU. Costs some
    µs per module.
    """
    device = device_for(device_of(model))
    if not device.can_capture:
        return f"a {device.name} captures no graphs"
    if attention.scale_period:
        return "it scales its queries by their column in the KV"
    if rope := changing_rope(model.config):
        return f"its {rope} rotary embedding changes with the length of a forward"
    if is_parallel(model):
        return "it is spread over several processes"
    if foreign := state_of(model).foreign:
        return f"{foreign[0].what}, whose Python a replay would leave out"
    return _module_reason(model)


def _module_reason(model: Any) -> str | None:
    devices = set()
    for module in model.modules():
        if has_moving_hook(module):
            return "accelerate's hooks move its tensors about"
        if is_compiled(module):
            return "torch.compile runs it, which may make graphs of its own"
        devices |= {str(tensor.device) for tensor in module.parameters(recurse=False)}
    return f"it is spread over {', '.join(sorted(devices))}" if len(devices) > 1 else None
