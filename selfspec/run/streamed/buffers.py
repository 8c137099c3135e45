"""The buffers that streamed layers share, on a CPU or on CUDA.

On CUDA, layers come from pinned memory, or from their files through pinned memory, and are copied
on a stream of their own. That part has not been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfspec.machine.memory import free_memory
from selfspec.run.streamed.budget import NUM_BUFFERS
from selfspec.run.streamed.files import Shard, aligned_buffer, pinned_bytes
from selfspec.run.streamed.images import Image

__all__ = ["Buffers", "CudaBuffers"]

_SHARE_OF_FREE = 0.5  # Pinned copies of layers take at most this share of what is free.


class Buffers:
    """Buffers in ordinary memory, read from files."""

    def __init__(self, images: Sequence[Image], shards: Sequence[Shard]) -> None:
        self._images = images
        self._shards = shards
        self._size = max(image.num_bytes for image in images)
        self._scratch = aligned_buffer(max(image.scratch_bytes for image in images))
        self._buffers = [self._new_buffer() for _ in range(NUM_BUFFERS)]
        self.bytes_read = 0

    def __len__(self) -> int:
        return NUM_BUFFERS

    def views(self, item: int) -> list[list[torch.Tensor]]:
        """An item's weights in each of the buffers."""
        return [self._images[item].views(buffer) for buffer in self._buffers]

    def fill(self, item: int, buffer: int) -> None:
        """Reads an item from its files."""
        self._images[item].fill(self._buffers[buffer], self._scratch)
        self.bytes_read += self._images[item].num_read

    def taken(self, buffer: int) -> None:
        """What is computed from now on may use the buffer."""

    def given_back(self, buffer: int) -> None:
        """What is computed from now on does not use the buffer."""

    def close(self) -> None:
        """Closes the files."""
        for shard in self._shards:
            shard.close()

    def _new_buffer(self) -> torch.Tensor:
        return aligned_buffer(self._size)


class CudaBuffers(Buffers):
    """Buffers on a CUDA device, copied from pinned memory on a side stream.

    If half of the free memory of the CPU holds all images, they are read once. Otherwise each is
    read from its files whenever it is due.
    """

    def __init__(
        self, images: Sequence[Image], shards: Sequence[Shard], device: torch.device
    ) -> None:
        self._device = device
        super().__init__(images, shards)
        new_event: Any = torch.cuda.Event  # untyped, like the stream's class
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._filled: list[Any] = [new_event() for _ in self._buffers]
        self._free: list[Any] = [new_event() for _ in self._buffers]
        self._copied: Any = new_event()
        self._kept: dict[int, torch.Tensor] = {}
        whole = sum(pinned_bytes(image.num_bytes) for image in images)
        keeps = whole <= _SHARE_OF_FREE * free_memory()
        self._staging = None if keeps else aligned_buffer(self._size, pinned=True)

    def fill(self, item: int, buffer: int) -> None:
        """Queues the copy of an item, behind the last use of the buffer."""
        size = self._images[item].num_bytes
        host = self._on_host(item)
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
        """The next copy into the buffer waits for what is queued now."""
        self._free[buffer].record(torch.cuda.current_stream(self._device))

    def _on_host(self, item: int) -> torch.Tensor:
        if item in self._kept:
            return self._kept[item]
        if self._staging is not None:
            self._copied.synchronize()  # The copy from the staging buffer must be done.
            host = self._staging
        else:
            size = self._images[item].num_bytes
            host = self._kept[item] = aligned_buffer(size, pinned=True)
        self._images[item].fill(host, self._scratch)
        return host

    def _new_buffer(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)
