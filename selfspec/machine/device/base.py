"""What the engine asks of a device, and a device on which everything happens at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

__all__ = ["CpuDevice", "Device", "Fetched", "Replay", "upload"]

Replay = Callable[[], None]


class Fetched(Protocol):
    """Tensors on their way to the CPU."""

    def get(self) -> tuple[torch.Tensor, ...]:
        """Waits for them, and for nothing that was queued behind them."""
        ...


class Device(Protocol):
    """One device, as one call works on it.

    Work is queued on a main stream, in order. `fetch` and `send` go where they are called: beside
    the main stream inside `side`.
    """

    name: str
    can_capture: bool

    def side(self, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        """Work queued inside runs beside the main stream, once what is queued so far is done.

        `tensors` are those of the main stream that it reads.
        """
        ...

    def join(self) -> None:
        """Lets what the main stream is given from now on wait for the work beside it."""
        ...

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Starts to copy `tensors` to the CPU."""
        ...

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """Starts to copy from the CPU; `host` may be written anew at once."""
        ...

    def capture(self, work: Callable[[], None]) -> Replay | str:
        """What queues `work` again on the same tensors, with no Python run; or why it can't.

        Runs `work` some times before and leaves open whether it ran last, so it has to be such
        that running it once more changes nothing.
        """
        ...


class _Arrived(NamedTuple):
    """What is there already."""

    tensors: tuple[torch.Tensor, ...]

    def get(self) -> tuple[torch.Tensor, ...]:
        return self.tensors


class CpuDevice:
    """Everything is done when the call returns; nothing runs beside anything."""

    can_capture = False
    _here = nullcontext()

    def __init__(self, name: str = "CPU") -> None:
        self.name = name

    def side(self, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        """Nothing special."""
        return self._here

    def join(self) -> None:
        """Nothing to wait for."""

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """The tensors themselves, where they are on a CPU."""
        return _Arrived(tuple(tensor.cpu() for tensor in tensors))

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """A copy."""
        into.copy_(host)

    def capture(self, work: Callable[[], None]) -> Replay | str:
        """Always the reason."""
        return f"a {self.name} captures no graphs"


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on `device`, without waiting for what is queued there."""
    if device.type != "cuda":
        return host.to(device)
    # pinned memory is reused only after the copies from it are done: torch's allocator sees to it
    return host.pin_memory().to(device, non_blocking=True)
