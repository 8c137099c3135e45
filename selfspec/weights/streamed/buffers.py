"""The buffers that streamed layers share, on a CPU or on CUDA.

On CUDA, layers come from pinned memory, or from their files through pinned memory, and are copied
on a stream of their own. That part has not been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfspec.machine.memory import free_memory
from selfspec.weights.streamed.files import BLOCK, Shard, aligned_buffer
from selfspec.weights.streamed.layer_weights import LayerWeights
from selfspec.weights.streamed.memory_plan import NUM_BUFFERS

_SHARE_OF_FREE = 0.5  # Pinned copies of layers take at most half of the CPU's free memory.


class Buffers:
    """Buffers in ordinary memory. Each call of `fill` reads one layer into one buffer."""

    def __init__(self, layers: Sequence[LayerWeights], shards: Sequence[Shard]) -> None:
        self._layers = layers
        self._shards = shards
        self._size = max(layer.num_bytes for layer in layers)
        self._scratch = aligned_buffer(max(layer.scratch_bytes for layer in layers))
        self._buffers = [self._new_buffer() for _ in range(NUM_BUFFERS)]
        self.bytes_read = 0

    def __len__(self) -> int:
        return NUM_BUFFERS

    def views(self, layer: int) -> list[list[torch.Tensor]]:
        """A layer's weights in each of the buffers."""
        return [self._layers[layer].views(buffer) for buffer in self._buffers]

    def fill(self, layer: int, buffer: int) -> None:
        """Reads a layer from its files."""
        self._layers[layer].fill(self._buffers[buffer], self._scratch)
        self.bytes_read += self._layers[layer].num_read

    def taken(self, buffer: int) -> None:
        """What is computed from now on may use the buffer."""

    def given_back(self, buffer: int) -> None:
        """What is computed from now on does not use the buffer."""

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def _new_buffer(self) -> torch.Tensor:
        return aligned_buffer(self._size)


class CudaBuffers(Buffers):
    """Buffers on a CUDA device, copied from pinned memory on a side stream.

    If half of the CPU's free memory holds all layers, they are read once. Otherwise each is read
    from its files whenever its turn comes.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], shards: Sequence[Shard], device: torch.device
    ) -> None:
        self._device = device
        super().__init__(layers, shards)
        new_event: Any = torch.cuda.Event  # untyped, like the stream's class
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._filled: list[Any] = [new_event() for _ in self._buffers]
        self._free: list[Any] = [new_event() for _ in self._buffers]
        self._copied: Any = new_event()
        self._kept: dict[int, torch.Tensor] = {}
        # Torch rounds pinned memory up to a power of two.
        whole = sum(1 << (layer.num_bytes + BLOCK - 1).bit_length() for layer in layers)
        keeps = whole <= _SHARE_OF_FREE * free_memory()
        self._staging = None if keeps else aligned_buffer(self._size, pinned=True)

    def fill(self, layer: int, buffer: int) -> None:
        """Queues the copy of a layer, after the last use of the buffer."""
        size = self._layers[layer].num_bytes
        host = self._on_host(layer)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[buffer])
            self._buffers[buffer][:size].copy_(host[:size], non_blocking=True)
            self._filled[buffer].record(self._stream)
            self._copied.record(self._stream)
        self.bytes_read += size

    def taken(self, buffer: int) -> None:
        """The forward's stream waits for the copy; the CPU does not."""
        torch.cuda.current_stream(self._device).wait_event(self._filled[buffer])

    def given_back(self, buffer: int) -> None:
        """The next copy into the buffer waits until what is queued now is computed."""
        self._free[buffer].record(torch.cuda.current_stream(self._device))

    def _on_host(self, layer: int) -> torch.Tensor:
        if layer in self._kept:
            return self._kept[layer]
        weights = self._layers[layer]
        if self._staging is not None:
            self._copied.synchronize()  # The copy from the staging buffer must be done.
            host = self._staging
        else:
            host = self._kept[layer] = aligned_buffer(weights.num_bytes, pinned=True)
        weights.fill(host, self._scratch)
        return host

    def _new_buffer(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)
