"""How a call's forwards are run, and what is kept of it for the next call.

One model's graphs serve one call at a time. They are made anew where the model has changed since,
and tried before first use: what a model does that no capture can follow, shows there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from selfspec.device import device_for
from selfspec.plugin.abilities import try_backend
from selfspec.plugin.backends import AttentionTypes
from selfspec.plugin.captures import capture_reason, capture_state
from selfspec.plugin.graphs import GraphBackend
from selfspec.plugin.runner import StaticRunner

__all__ = ["Forwards", "decode_mode"]

_WIDEST_TRIED = 8


class Forwards:
    """The runners of one `SelfSpec`, one for each model. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def lend(
        self, model: Any, attention: AttentionTypes | None, forward: str
    ) -> Iterator[StaticRunner | str | None]:
        """The model's runner for one call, made on first use; or why there is none.

        None where none was asked for. `forward` is one of `FORWARDS`, `attention` None where the
        model is given chains.
        """
        device = device_for(model.device, overlap=False)
        if forward == "eager" or (forward == "auto" and not device.can_capture):
            yield None
        elif attention is None:
            yield "a chain grows the stock KV cache, which has no fixed places"
        elif forward != "compiled" and not device.can_capture:
            yield f"a {device.name} captures no graphs"
        else:
            with self._of(model).borrow(model, attention, forward == "compiled") as runner:
                yield runner

    def _of(self, model: Any) -> _Kept:
        with self._lock:
            return self._kept.setdefault(model, _Kept())


class _Kept:
    """One model's runner, or why it has none, for the state that the model was last found in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: Hashable = None
        self._found: StaticRunner | str = ""

    @contextmanager
    def borrow(
        self, model: Any, attention: AttentionTypes, compiled: bool
    ) -> Iterator[StaticRunner | str]:
        if not self._lock.acquire(blocking=False):
            yield "another call is using this model's fixed KV slots"
            return
        try:
            yield capture_reason(model, attention) or self._fresh(model, attention, compiled)
        finally:
            self._lock.release()

    def _fresh(self, model: Any, attention: AttentionTypes, compiled: bool) -> StaticRunner | str:
        """What was found before, or else what is found now."""
        state = (compiled, capture_state(model))
        if state != self._state:
            self._state, self._found = None, ""  # frees the old runner before there is a new one
            self._found = _tried(model, attention, compiled)
            self._state = state
        if isinstance(self._found, StaticRunner) and self._found.kind == "eager":
            self._found = str(self._found.reason)  # it failed on the way: eager forwards are better
        return self._found


def decode_mode(model: Any) -> AbstractContextManager[None]:
    """Stock's own switches for the time of decoding, where this version has them."""
    enter: Callable[[], AbstractContextManager[None]]
    enter = getattr(model, "_optimize_model_for_decode", nullcontext)
    return enter()


def _tried(model: Any, attention: AttentionTypes, compiled: bool) -> StaticRunner | str:
    """A runner whose forwards come out right; or why there is none."""
    device = device_for(model.device, overlap=False)
    runner = StaticRunner(attention, device, model.device, compiled=compiled)

    def new_backend(model: Any, *args: Any, **kwargs: Any) -> GraphBackend:
        return GraphBackend(model, runner, *args, **kwargs, widest=_WIDEST_TRIED)

    try:
        with decode_mode(model):
            reason = try_backend(model, attention, new_backend)
    except torch.OutOfMemoryError:
        reason = "there is no memory to try it"
    return runner.reason or reason or runner
