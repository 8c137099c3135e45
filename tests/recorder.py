"""A device that behaves as a CUDA device may at its worst, on a CPU.

What is captured is a list of operations with the very tensors they worked on. A replay runs those
operations again and no Python, so whatever Python took from one step is wrong in the next.
What is fetched can be had only from the call that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selfspec.machine.device import failed_capture

aten = torch.ops.aten

# Operations that need a number from the device, or have a shape that depends on one.
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXED = (aten.index, aten.index_put, aten.index_put_)
REFUSED_CALLS = {
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.cpu,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
}
NOT_PERMITTED = "operation not permitted when stream is capturing"


class Operation:
    """One operation and the tensors that it worked on."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self.results: list[torch.Tensor] = []  # new ones, which no input shares its memory with

    def run(self) -> Any:
        """Runs it for the first time."""
        inputs = {_memory(x) for x in tree_leaves((self._args, self._kwargs)) if _is_tensor(x)}
        out = self._func(*self._args, **self._kwargs)
        self.results = [x for x in tree_leaves(out) if _is_tensor(x) and _memory(x) not in inputs]
        return out

    @property
    def writes(self) -> bool:
        """Does it change one of its inputs?"""
        return bool(self._func._schema.is_mutable)

    @property
    def is_view(self) -> bool:
        """Does it neither compute nor write anything?"""
        return not self.results and not self.writes

    def again(self) -> None:
        """Runs it on what its inputs hold now, and leaves the results where they were left."""
        if self.is_view:
            return
        out = self._func(*self._args, **self._kwargs)
        if not self.writes:
            new = [x for x in tree_leaves(out) if _is_tensor(x)]
            for result, value in zip(self.results, new, strict=True):
                result.copy_(value)


class Tape(TorchDispatchMode):
    """Records what runs inside, and refuses what a capture refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args, kwargs or {}):
            raise RuntimeError(f"{NOT_PERMITTED} ({func})")
        operation = Operation(func, args, kwargs or {})
        self.operations.append(operation)
        return operation.run()

    def replay(self) -> None:
        with torch.inference_mode():  # whose tensors can be written nowhere else
            for operation in self.operations:
                operation.again()


class NoNumbers(TorchFunctionMode):
    """Refuses the calls that read a value without any operation that a dispatcher sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REFUSED_CALLS:
            raise RuntimeError(f"{NOT_PERMITTED} ({func.__name__})")
        return func(*args, **(kwargs or {}))


class Arriving:
    """Copies that are there once they have been waited for."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], log: list[str]) -> None:
        self._tensors, self._log = tensors, log

    def get(self) -> tuple[torch.Tensor, ...]:
        self._log.append("get")
        return self._tensors


class RecordingDevice:
    """Takes its calls down in `log`; what is captured is replayed."""

    name = "recorder"
    can_capture = True

    def __init__(self, log: list[str], *, fails_at: int | None = None) -> None:
        self.log = log
        self._fails_at = fails_at  # the capture, counted over the log, that fails

    def fetch(self, *tensors: torch.Tensor) -> Arriving:
        self.log.append("fetch")
        return Arriving(tuple(tensor.clone() for tensor in tensors), self.log)

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        self.log.append("send")
        into.copy_(host)

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | str:
        self.log.append("capture")
        try:
            work()
            with NoNumbers(), Tape() as tape:
                self._fail_if_asked()
                work()
        except Exception as error:
            return failed_capture(error)

        def replay() -> None:
            self.log.append("replay")
            tape.replay()

        return replay

    def _fail_if_asked(self) -> None:
        if self._fails_at is not None and self.log.count("capture") >= self._fails_at:
            raise RuntimeError(NOT_PERMITTED)


def use_recorders(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """Makes every device a recording one; returns what they are asked, in order."""
    log: list[str] = []

    def new_device(_device: torch.device) -> RecordingDevice:
        return RecordingDevice(log, **options)

    for name in ("engine", "runner", "cuda.kept"):
        monkeypatch.setattr(f"selfspec.{name}.device_for", new_device)
    return log


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func.overloadpacket in INDEXED:  # Numbers as indices have a shape that is known.
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    knows_size = kwargs.get("output_size") is not None
    return not knows_size and not WAITING_TAGS.isdisjoint(func.tags)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
