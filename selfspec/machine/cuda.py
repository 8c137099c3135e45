"""A CUDA device: copies to and from pinned memory, and captured graphs.

All calls share one capture stream for each device, because a stream keeps the memory that it has
used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch

__all__ = ["CudaDevice", "Fetched", "index_of"]

# In older versions, a capture that fails leaves torch's generator and memory pool capturing.
_FIRST_TORCH = (2, 12)
# The process may have one capture under way at a time.
_capturing = threading.Lock()


class _Event(Protocol):
    def synchronize(self) -> object:
        """Waits for the work that was queued before it."""
        ...


class Fetched(NamedTuple):
    """Tensors that are being copied to the CPU, and an event that tells when that is done."""

    tensors: tuple[torch.Tensor, ...]
    event: _Event | None = None  # None if it is done.

    def get(self) -> tuple[torch.Tensor, ...]:
        """Waits for the tensors, but not for work that was queued after them."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensors


class CudaDevice:
    """Copies and graphs of one CUDA device; all graphs of an instance share a pool of memory.

    Serves one call, and so one thread, at a time.
    """

    name = "CUDA device"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_graph: Callable[[], Any] = lambda: None
        self.can_capture = tuple(map(int, torch.__version__.split(".")[:2])) >= _FIRST_TORCH
        if not self.can_capture:
            self.name = f"CUDA device under torch {torch.__version__}, which is older than 2.12,"

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Starts copies to pinned memory, which torch reuses when they are no longer needed."""
        hosts = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        )
        return Fetched(hosts, torch.cuda.current_stream(self._device).record_event())

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """Copies `host` to pinned memory and starts a copy from there.

        The caller may then write to `host` again. torch reuses the pinned memory only when the copy
        is done.
        """
        pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True)
        into.copy_(pinned.copy_(host), non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | str:
        """Runs `work` once on the capture stream, and then captures it as a graph.

        The graph is replayed once, which loads it onto the device.
        """
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(index_of(self._device))
        try:
            with _capturing:
                self._warm_up(work, stream)
                self._record(graph, work, stream)
        except Exception as error:  # Models can fail here in any way that their code allows.
            first_line = str(error).partition("\n")[0]
            return f"capturing it fails ({type(error).__name__}: {first_line})"
        graph.replay()
        torch.cuda.current_stream(self._device).synchronize()
        self._last_graph = ref(graph)
        return graph.replay

    def _warm_up(self, work: Callable[[], None], stream: Any) -> None:
        """Runs `work`, so that libraries make their handles and choose their kernels."""
        main = torch.cuda.current_stream(self._device)
        stream.wait_stream(main)
        try:
            with torch.cuda.stream(stream):
                work()
        finally:  # After an error, the work that was queued before it still runs.
            main.wait_stream(stream)

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None], stream: Any) -> None:
        main = torch.cuda.current_stream(self._device)
        # A pool can't be used again once all its graphs are gone.
        last_graph = self._last_graph()
        pool = torch.cuda.graph_pool_handle() if last_graph is None else last_graph.pool()
        # Other threads may go on during the capture.
        capture = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
        with torch.cuda.stream(main), capture:  # If it fails, it may leave another stream current.
            work()


def index_of(device: torch.device) -> int:
    """The number of a CUDA device, which may be named without one."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _capture_stream(index: int) -> Any:
    """The stream that all calls capture on."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
