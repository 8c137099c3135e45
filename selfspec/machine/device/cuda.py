"""A CUDA device: a side stream, pinned copies behind events, captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch

from selfspec.machine.device.base import Fetched, Replay

__all__ = ["CudaDevice"]

_NUM_WARM_UPS = 2  # runs before a capture: libraries make their handles and choose their kernels


class _Arriving(NamedTuple):
    """Pinned copies under way, and the event behind the last of them."""

    tensors: tuple[torch.Tensor, ...]
    event: Any

    def get(self) -> tuple[torch.Tensor, ...]:
        self.event.synchronize()
        return self.tensors


class CudaDevice:
    """Streams and graphs of one CUDA device. What it captures shares one pool of memory.

    One call, and so one thread, uses an instance at a time.
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
        """The side stream, behind all that the main one has been given; without it the main one."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for tensor in tensors:  # their memory is not given away while they are read here
                tensor.record_stream(self._side)
            yield

    def join(self) -> None:
        """The main stream waits for an event of the side stream; the CPU does not."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """Copies to pinned memory, which torch takes back and uses again."""
        hosts = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        )
        return _Arriving(hosts, torch.cuda.current_stream(self._device).record_event())

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        """From a pinned copy of `host`, whose memory is not used again before it has arrived."""
        into.copy_(host.pin_memory(), non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Replay | str:
        """A replay of `work`, which has run some times on a stream of its own before."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._warm_up(work)
            self._record(graph, work)
        except Exception as error:  # whatever a model's code does that can't be captured
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
        living = self._last_graph()  # a pool whose graphs are all gone can't be used again
        pool = torch.cuda.graph_pool_handle() if living is None else living.pool()
        with (
            torch.cuda.stream(main),  # a capture that fails may leave another stream behind
            torch.cuda.graph(
                graph,
                pool=pool,
                stream=self._capture_stream,
                capture_error_mode="thread_local",  # other threads may go on with their own work
            ),
        ):
            work()


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
