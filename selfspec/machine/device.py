"""Devices: copies from and to the CPU, captured graphs, random generators, and their names.

Knows tensors and callables; nothing of models, trees or KV.
"""

from __future__ import annotations

import platform
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import torch

from selfspec.compat.kernels import calculates_in_half, is_out_of_memory

Replay = Callable[[], None]

# Before torch 2.12, a capture that fails leaves torch's generator and memory pool capturing.
_FIRST_TORCH = (2, 12)
# A process may have one capture under way at a time.
_capturing = threading.Lock()


class Fetched(NamedTuple):
    """Tensors that are being copied to the CPU."""

    tensors: tuple[torch.Tensor, ...]
    wait: Callable[[], object] | None = None  # Waits for the copies; None: they are done.

    def get(self) -> tuple[torch.Tensor, ...]:
        """Waits for the tensors, but not for work that was queued after them."""
        if self.wait is not None:
            self.wait()
        return self.tensors


class Device:
    """One device as one call uses it. It does its work in order.

    This class is for the CPU, which queues nothing: all work is done when a call returns.
    """

    def __init__(self, name: str = "CPU") -> None:
        self.name = name
        self.can_capture = False

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Starts to copy `tensors` to the CPU."""
        return Fetched(tuple(tensor.cpu() for tensor in tensors))

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """Starts to copy from the CPU; `host` may be overwritten as soon as this returns."""
        into.copy_(host)

    def capture(self, work: Callable[[], None]) -> Replay | str:
        """A function that queues `work` again on the same tensors, or why there is none.

        `work` runs one extra time, so running it again must change nothing. Raises
        `torch.OutOfMemoryError` where memory ran out, which says nothing of `work`.
        """
        return f"a {self.name} captures no graphs"


class CudaDevice(Device):
    """A CUDA device, whose copies go through pinned memory while it computes.

    All graphs of an instance share a pool of memory. It serves one call, and so one thread, at a
    time.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__("CUDA device")
        self._device = device
        self._last_graph: Callable[[], Any] = lambda: None
        self.can_capture = tuple(map(int, torch.__version__.split(".")[:2])) >= _FIRST_TORCH
        if not self.can_capture:
            self.name = f"CUDA device under torch {torch.__version__}, which is older than 2.12,"

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Starts copies to pinned memory, which torch uses again once nobody holds them."""
        hosts = tuple(_pinned(tensor, non_blocking=True) for tensor in tensors)
        return Fetched(hosts, torch.cuda.current_stream(self._device).record_event().synchronize)

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """Copies `host` to pinned memory and starts a copy from there.

        torch uses the pinned memory again only when that copy is done.
        """
        into.copy_(_pinned(host), non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Replay | str:
        """Runs `work` once on the capture stream, and then captures it as a graph.

        The graph is replayed once, which loads it onto the device.
        """
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(_index_of(self._device))
        try:
            with _capturing:
                self._warm_up(work, stream)
                self._record(graph, work, stream)
        except Exception as error:  # Models can fail here in any way that their code allows.
            return failed_capture(error)
        graph.replay()
        torch.cuda.current_stream(self._device).synchronize()
        self._last_graph = ref(graph)
        return graph.replay

    def _warm_up(self, work: Callable[[], None], stream: torch.cuda.Stream) -> None:
        """Runs `work`, so that libraries make their handles and choose their kernels."""
        main = torch.cuda.current_stream(self._device)
        stream.wait_stream(main)
        try:
            with torch.cuda.stream(stream):
                work()
        finally:  # After an error, the work that was queued before it still runs.
            main.wait_stream(stream)

    def _record(
        self, graph: torch.cuda.CUDAGraph, work: Callable[[], None], stream: torch.cuda.Stream
    ) -> None:
        main = torch.cuda.current_stream(self._device)
        # A pool can't be used again once all its graphs are gone.
        last_graph = self._last_graph()
        pool = torch.cuda.graph_pool_handle() if last_graph is None else last_graph.pool()
        # Other threads may go on during the capture.
        capture = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
        with torch.cuda.stream(main), capture:  # If it fails, it may leave another stream current.
            work()


def failed_capture(error: Exception) -> str:
    """What a capture that failed says of what it captured; raises where memory ran out.

    An error while memory is short may be followed by one that only says that the capture broke off.
    """
    first_line = str(error).partition("\n")[0]
    if is_out_of_memory(error) or (error.__context__ and is_out_of_memory(error.__context__)):
        raise torch.OutOfMemoryError(first_line) from error
    return f"capturing it fails ({type(error).__name__}: {first_line})"


CPU = Device()


def device_for(device: torch.device) -> Device:
    """The `Device` for a device of torch."""
    if device.type == "cuda":
        return CudaDevice(device)
    return CPU if device.type == "cpu" else Device(f"{device.type} device")


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies `host` to `device` without waiting for the work that is queued there."""
    if device.type != "cuda":
        return host.to(device)
    # Torch's allocator reuses pinned memory only after the copies from it are done.
    return host.pin_memory().to(device, non_blocking=True)


def default_generator(device: torch.device) -> torch.Generator:
    """A device's default random generator; on devices other than CUDA, that of the CPU."""
    if device.type == "cuda":
        return torch.cuda.default_generators[_index_of(device)]
    return torch.default_generator


@contextmanager
def seeded(seed: int | None, devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, the CPU and `devices` draw from `seed`; after it, their generators are as before.

    With None they are not seeded. `torch.manual_seed` would seed every CUDA device.
    """
    types = {device.type for device in devices}
    indices = sorted({_index_of(device) for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(indices):
        if seed is not None and types <= {"cpu", "cuda"}:
            for device in (torch.device("cpu"), *devices):
                default_generator(device).manual_seed(seed)
        elif seed is not None:
            torch.manual_seed(seed)
        yield


def _pinned(tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
    """A copy of a tensor in pinned memory of its own."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor, non_blocking=non_blocking)


def _index_of(device: torch.device) -> int:
    """The number of a CUDA device, which may be named without one."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """The stream that all calls capture on."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def device_name(device: torch.device) -> str:
    """The name of the card or the processor; for other devices, their type and the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor() if device.type == "cpu" else f"{device.type}, {processor()}"


@cache
def calculates_in(dtype: torch.dtype) -> bool:
    """Does this CPU calculate in a precision? If not, it converts to float32 in every product."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    return name is None or calculates_in_half(name)


@cache
def processor() -> str:
    """The processor's name, and the instruction set that torch uses."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # Only Linux has this file.
        info = ""
    line = re.search(r"^model name\s*: (.+)", info, re.MULTILINE)
    name = line[1] if line else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
