"""A CUDA device: a side stream, pinned copies behind events, captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch

from selfspec.machine.device import Fetched, Replay

__all__ = ["CudaDevice"]

# Runs before a capture, in which libraries make their handles and choose their kernels.
_NUM_WARM_UPS = 2


class _Arriving(NamedTuple):
    """Pinned copies under way, and an event that fires when the last of them is done."""

    tensors: tuple[torch.Tensor, ...]
    event: Any

    def get(self) -> tuple[torch.Tensor, ...]:
        self.event.synchronize()
        return self.tensors


class CudaDevice:
    """Streams and graphs of one CUDA device; all its graphs share one pool of memory.

    Only one call, and so only one thread, uses an instance at a time.
    """

    name = "CUDA device"
    can_capture = True

    def __init__(self, device: torch.device, *, overlap: bool) -> None:
        self._device = device
        self._side = _new_stream(device) if overlap else None
        self._capture_stream: Any = None
        self._last_graph: Callable[[], Any] = lambda: None

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
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        )
        return _Arriving(hosts, torch.cuda.current_stream(self._device).record_event())

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """Starts a copy from pinned memory, which torch reuses only once the copy is done."""
        into.copy_(host if host.is_pinned() else host.pin_memory(), non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Replay | str:
        """Captures `work` as a graph, after some runs of it on a stream of its own."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._warm_up(work)
            self._record(graph, work)
        except Exception as error:  # Models can fail here in any way that their code allows.
            return f"capturing it fails ({type(error).__name__}: {_first_line(error)})"
        self._last_graph = ref(graph)
        return graph.replay

    def _warm_up(self, work: Callable[[], None]) -> None:
        if self._capture_stream is None:
            self._capture_stream = _new_stream(self._device)
        main = torch.cuda.current_stream(self._device)
        self._capture_stream.wait_stream(main)
        with torch.cuda.stream(self._capture_stream):
            for _ in range(_NUM_WARM_UPS):
                work()
        main.wait_stream(self._capture_stream)

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
                stream=self._capture_stream,
                capture_error_mode="thread_local",  # Other threads may work on.
            ),
        ):
            work()


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
