"""A CUDA device: a side stream, pinned copies behind events, captured graphs.

A device has one side stream and one stream for captures, which all calls share, since a capture
stream keeps the memory that it has used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch

__all__ = ["CudaDevice", "Fetched", "index_of"]

# A capture that fails leaves the generator and the pool of an older torch in the midst of it.
_FIRST_TORCH = (2, 12)
# The process may have one capture under way at a time.
_capturing = threading.Lock()


class Fetched(NamedTuple):
    """Tensors on their way to the CPU, and an event that fires when the last of them is there."""

    tensors: tuple[torch.Tensor, ...]
    event: Any = None  # None: they are there.

    def get(self) -> tuple[torch.Tensor, ...]:
        """Waits for the tensors, but not for work that was queued after them."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensors


class CudaDevice:
    """Streams and graphs of one CUDA device; all graphs of an instance share a pool of memory.

    Only one call, and so only one thread, uses an instance at a time.
    """

    name = "CUDA device"

    def __init__(self, device: torch.device, *, overlap: bool) -> None:
        self._device = device
        self._side = _stream(device, "side") if overlap else None
        self._last_graph: Callable[[], Any] = lambda: None
        self.can_capture = tuple(map(int, torch.__version__.split(".")[:2])) >= _FIRST_TORCH
        if not self.can_capture:
            self.name = f"CUDA device under torch {torch.__version__}, which is older than 2.12,"

    @contextmanager
    def side(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Inside, work goes to the side stream, or to the main stream if there is no overlap."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for tensor in tensors:
                # The allocator must not reuse this memory while the side stream reads it.
                tensor.record_stream(self._side)
            yield

    def join(self) -> None:
        """Makes the main stream wait for the side stream; the CPU does not wait."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

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
        """Starts a copy from pinned memory, which torch reuses only once the copy is done.

        That memory is never `host` itself: the CPU may write to it before the device reads it.
        """
        pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True)
        into.copy_(pinned.copy_(host), non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | str:
        """Captures `work` as a graph, after a run of it on the stream of captures.

        The graph is replayed once, which loads it onto the device.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with _capturing:
                self._warm_up(work)
                self._record(graph, work)
        except Exception as error:  # Models can fail here in any way that their code allows.
            first_line = str(error).partition("\n")[0]
            return f"capturing it fails ({type(error).__name__}: {first_line})"
        graph.replay()
        torch.cuda.current_stream(self._device).synchronize()
        self._last_graph = ref(graph)
        return graph.replay

    def _warm_up(self, work: Callable[[], None]) -> None:
        """Lets libraries make their handles and choose their kernels."""
        stream, main = _stream(self._device, "capture"), torch.cuda.current_stream(self._device)
        stream.wait_stream(main)
        try:
            with torch.cuda.stream(stream):
                work()
        finally:  # What was queued before an error still writes keys and values.
            main.wait_stream(stream)

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        main = torch.cuda.current_stream(self._device)
        # A pool can't be used again once all its graphs are gone.
        last_graph = self._last_graph()
        pool = torch.cuda.graph_pool_handle() if last_graph is None else last_graph.pool()
        with (
            torch.cuda.stream(main),  # A capture that fails may leave another stream current.
            torch.cuda.graph(
                graph,
                pool=pool,
                stream=_stream(self._device, "capture"),
                capture_error_mode="thread_local",  # Other threads may work on.
            ),
        ):
            work()


def index_of(device: torch.device) -> int:
    """The number of a CUDA device, which may be named without one."""
    return torch.cuda.current_device() if device.index is None else device.index


def _stream(device: torch.device, use: str) -> Any:
    """The one stream of a device for a use."""
    return _stream_of(index_of(device), use)


@cache
def _stream_of(index: int, _use: str) -> Any:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
