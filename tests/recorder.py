"""A device that behaves as a CUDA device may at its worst, on a CPU.

What is captured is a list of operations with the very tensors they worked on. A replay runs those
operations again and no Python, so whatever Python took from one step is wrong in the next.
Work beside the main stream is put off until somebody waits for it; until then its results are
garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Delay(TorchDispatchMode):
    """Puts off what is asked for inside; results are garbage until it is run."""

    def __init__(self, waiting: list[Operation]) -> None:
        super().__init__()
        self._waiting = waiting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = Operation(func, args, kwargs or {})
        if operation.writes:
            self._waiting.append(operation)
            return args[0]
        out = operation.run()
        if not operation.is_view and func.overloadpacket is not aten.lift_fresh:
            for result in operation.results:
                # whole numbers stay small, since they may be taken for indices meanwhile
                result.fill_(float("nan") if result.dtype.is_floating_point else 0)
            self._waiting.append(operation)
        return out


class NoNumbers(TorchFunctionMode):
    """Refuses the calls that read a value without any operation that a dispatcher sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REFUSED_CALLS:
            raise RuntimeError(f"{NOT_PERMITTED} ({func.__name__})")
        return func(*args, **(kwargs or {}))


class Arriving:
    """Copies that are there once they have been waited for."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], wait: Callable[[], None]) -> None:
        self._tensors, self._wait = tensors, wait

    def get(self) -> tuple[torch.Tensor, ...]:
        self._wait()
        return self._tensors


class RecordingDevice:
    """Takes its calls down in `log`; captures are replayed, side work is late."""

    name = "recorder"
    can_capture = True

    def __init__(
        self,
        log: list[str],
        *,
        overlap: bool = True,
        fails_at: int | None = None,
    ) -> None:
        self.log = log
        self._overlap = overlap
        self._fails_at = fails_at  # the capture, counted over the log, that fails
        self._waiting: list[Operation] = []
        self._is_beside = False

    @contextmanager
    def side(self, *tensors: torch.Tensor) -> Iterator[None]:
        if not self._overlap:
            yield
            return
        self.log.append("side")
        self._is_beside = True
        try:
            with Delay(self._waiting):
                yield
        finally:
            self._is_beside = False

    def join(self) -> None:
        self.log.append("join")
        self._run_late(list(self._waiting))

    def fetch(self, *tensors: torch.Tensor) -> Arriving:
        self.log.append("fetch beside" if self._is_beside else "fetch")
        copies = tuple(tensor.clone() for tensor in tensors)  # late inside `side`, like the rest
        upto = list(self._waiting) if self._is_beside else []
        return Arriving(copies, lambda: self._catch_up(upto))

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
            return f"capturing it fails ({type(error).__name__}: {error})"

        def replay() -> None:
            self.log.append("replay")
            tape.replay()

        return replay

    def _fail_if_asked(self) -> None:
        if self._fails_at is not None and self.log.count("capture") >= self._fails_at:
            raise RuntimeError(NOT_PERMITTED)

    def _catch_up(self, upto: list[Operation]) -> None:
        """Waits for what was queued before a fetch, and for nothing behind it."""
        self.log.append("get")
        self._run_late(upto)

    def _run_late(self, operations: list[Operation]) -> None:
        for operation in operations:
            if operation in self._waiting:
                self._waiting.remove(operation)
                operation.again()


def use_recorders(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """Makes every device a recording one; returns what they are asked, in order."""
    log: list[str] = []

    def new_device(_device: torch.device, *, overlap: bool) -> RecordingDevice:
        return RecordingDevice(log, overlap=overlap, **options)

    for name in ("engine", "run.run", "run.graphs.kept"):
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
