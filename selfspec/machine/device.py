"""What the engine asks of a device, and a device on which everything happens at once.

Knows tensors and callables; nothing of models, trees or KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    """One device, as one call works on it.

    Work is queued in order on a main stream. `fetch` and `send` use the stream on which they are
    called: inside `side`, they run beside the main stream.
    """

    name: str
    can_capture: bool

    def side(self, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        """Runs the work queued inside, which reads `tensors`, beside the main stream."""
        ...

    def join(self) -> None:
        """Makes later work on the main stream wait for the work beside it."""
        ...

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Starts to copy `tensors` to the CPU."""
        ...

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """Starts to copy from the CPU; `host` may be overwritten as soon as this returns."""
        ...

    def capture(self, work: Callable[[], None]) -> Replay | str:
        """Returns a function that queues `work` again on the same tensors, or why it can't.

        One more run of `work` must change nothing.
        """
        ...


class PlainDevice:
    """A device without streams: all work is done when the call returns."""

    can_capture = False

    def __init__(self, name: str = "CPU") -> None:
        self.name = name

    def side(self, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        return Fetched(tuple(tensor.cpu() for tensor in tensors))

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(host)

    def capture(self, work: Callable[[], None]) -> Replay | str:
        return f"a {self.name} captures no graphs"


def device_for(device: torch.device, *, overlap: bool) -> Device:
    """How to work on `device`; with `overlap`, a CUDA device gets a side stream."""
    if device.type == "cuda":
        return CudaDevice(device, overlap=overlap)
    return PlainDevice("CPU" if device.type == "cpu" else f"{device.type} device")


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on `device`, without waiting for the work that is queued there."""
    if device.type != "cuda":
        return host.to(device)
    # Torch's allocator reuses pinned memory only after the copies from it are done.
    return host.pin_memory().to(device, non_blocking=True)


def default_generator(device: torch.device) -> torch.Generator:
    """What a device draws from where no generator is named; the CPU's on most kinds of device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[index_of(device)]
    return torch.default_generator


@contextmanager
def own_seed(seed: int | None, devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, a CPU and some devices draw from a seed, or go on; behind it they are as before.

    `torch.manual_seed` would seed every CUDA device.
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
