"""What the engine asks of a device, and a device that finishes each operation at once.

Knows tensors and callables; nothing of models, trees or KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from selfspec.machine.cuda import CudaDevice, Fetched, index_of

__all__ = [
    "Device",
    "Fetched",
    "PlainDevice",
    "Replay",
    "default_generator",
    "device_for",
    "own_seed",
    "upload",
]

Replay = Callable[[], None]


class Device(Protocol):
    """One device, as one call uses it. What it is asked to do is done in order."""

    name: str
    can_capture: bool

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Starts to copy `tensors` to the CPU."""
        ...

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """Starts to copy from the CPU; `host` may be overwritten as soon as this returns."""
        ...

    def capture(self, work: Callable[[], None]) -> Replay | str:
        """Returns a function that queues `work` again on the same tensors, or why there is none.

        `work` runs one extra time, so running it again must change nothing.
        """
        ...


class PlainDevice:
    """A device that queues nothing: all work is done when the call returns."""

    can_capture = False

    def __init__(self, name: str = "CPU") -> None:
        self.name = name

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        return Fetched(tuple(tensor.cpu() for tensor in tensors))

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(host)

    def capture(self, work: Callable[[], None]) -> Replay | str:
        return f"a {self.name} captures no graphs"


def device_for(device: torch.device) -> Device:
    """The `Device` for a device of torch."""
    if device.type == "cuda":
        return CudaDevice(device)
    return PlainDevice("CPU" if device.type == "cpu" else f"{device.type} device")


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies `host` to `device` without waiting for the work that is queued there."""
    if device.type != "cuda":
        return host.to(device)
    # Torch's allocator reuses pinned memory only after the copies from it are done.
    return host.pin_memory().to(device, non_blocking=True)


def default_generator(device: torch.device) -> torch.Generator:
    """A device's default random generator; on devices other than CUDA, that of the CPU."""
    if device.type == "cuda":
        return torch.cuda.default_generators[index_of(device)]
    return torch.default_generator


@contextmanager
def own_seed(seed: int | None, devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, the CPU and `devices` draw from `seed`; after it, their generators are as before.

    With None they are not seeded. `torch.manual_seed` would seed every CUDA device.
    """
    kinds = {device.type for device in devices}
    indices = sorted({index_of(device) for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(indices):
        if seed is not None and kinds <= {"cpu", "cuda"}:
            for device in (torch.device("cpu"), *devices):
                default_generator(device).manual_seed(seed)
        elif seed is not None:
            torch.manual_seed(seed)
        yield
