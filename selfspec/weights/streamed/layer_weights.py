"""The weights of one layer: how they lie in a buffer, and how they are read from their files.

Streamed layers share a few such buffers.

Tensors that the files hold as the model wants them are read straight into the buffer, together with
their neighbours. What must be converted or joined passes through a scratch buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from selfspec.weights.streamed.files import BLOCK, Shard, StoredTensor, aligned_buffer, in_blocks
from selfspec.weights.streamed.memory_plan import NUM_BUFFERS

_PART = 1 << 22  # At most this many bytes are converted at a time.
ALIGNMENT = 64  # Weights that are not read directly begin at a multiple of this many bytes.


class Weight(NamedTuple):
    """A weight of a model: its dtype and shape there, and where the files hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: Sequence[StoredTensor]  # Joined, they are the weight.

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether a file holds it as it is, at a place that torch can view in this dtype."""
        first, *others = self.tensors
        is_aligned = first.offset % self.dtype.itemsize == 0
        return not others and first.dtype is self.dtype and is_aligned


class _Run(NamedTuple):
    """Neighbours in a file, read at once; the three numbers are multiples of `BLOCK`."""

    shard: Shard
    start: int  # in the file
    into: int  # in the buffer
    num_bytes: int


class LayerWeights:
    """The weights of a layer in a buffer of `num_bytes`; `num_read` bytes are read for them."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = weights
        self._starts = [0] * len(weights)  # in the buffer
        self._runs: list[_Run] = []
        self.num_bytes = 0
        self._lay_out_runs()
        self._others = [i for i, weight in enumerate(weights) if not weight.is_direct]
        for index in self._others:
            self._starts[index] = self.num_bytes
            self.num_bytes += -(-weights[index].num_bytes // ALIGNMENT) * ALIGNMENT
        self._copied = [tensor for index in self._others for tensor in weights[index].tensors]
        read = [run.num_bytes for run in self._runs] + [weight.num_bytes for weight in self._copied]
        self.num_read = sum(read)

    @property
    def scratch_bytes(self) -> int:
        """How large a scratch buffer `fill` needs: 0 if all weights are read directly."""
        longest = max((tensor.num_bytes for tensor in self._copied), default=0)
        return min(longest, _PART) + 2 * BLOCK if self._copied else 0

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The weights as they lie in a buffer (N,) of bytes."""
        return [
            buffer[start : start + weight.num_bytes].view(weight.dtype).view(weight.shape)
            for weight, start in zip(self._weights, self._starts, strict=True)
        ]

    def fill(self, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        """Reads all weights into a buffer."""
        for shard in {tensor.shard for weight in self._weights for tensor in weight.tensors}:
            shard.check()
        for run in self._runs:
            run.shard.read(run.start, buffer[run.into : run.into + run.num_bytes])
        views = self.views(buffer) if self._others else []
        for index in self._others:
            read_into(views[index], self._weights[index].tensors, scratch)

    def _lay_out_runs(self) -> None:
        """Gives direct weights their places. Neighbours in a file are neighbours in the buffer."""
        direct = [(w.tensors[0], i) for i, w in enumerate(self._weights) if w.is_direct]
        direct.sort(key=lambda piece: (str(piece[0].shard.path), piece[0].offset))
        for tensor, index in direct:
            run = self._runs[-1] if self._runs else None
            if run and run.shard is tensor.shard and tensor.offset <= run.start + run.num_bytes:
                self._runs.pop()
            else:
                run = _Run(tensor.shard, tensor.offset // BLOCK * BLOCK, self.num_bytes, 0)
            in_run = tensor.offset - run.start
            run = run._replace(num_bytes=max(run.num_bytes, in_blocks(in_run + tensor.num_bytes)))
            self._runs.append(run)
            self._starts[index] = run.into + in_run
            self.num_bytes = run.into + run.num_bytes


class Buffers:
    """The buffers that streamed layers share. `fill` reads one layer into one of them."""

    def __init__(self, layers: Sequence[LayerWeights], shards: Sequence[Shard]) -> None:
        self._layers = layers
        self._shards = shards
        self._scratch = aligned_buffer(max(layer.scratch_bytes for layer in layers))
        size = max(layer.num_bytes for layer in layers)
        self._buffers = [aligned_buffer(size) for _ in range(NUM_BUFFERS)]
        self.bytes_read = 0

    def __len__(self) -> int:
        return NUM_BUFFERS

    def views(self, layer: int) -> list[list[torch.Tensor]]:
        """A layer's weights in all of the buffers."""
        return [self._layers[layer].views(buffer) for buffer in self._buffers]

    def fill(self, layer: int, buffer: int) -> None:
        self._layers[layer].fill(self._buffers[buffer], self._scratch)
        self.bytes_read += self._layers[layer].num_read

    def close(self) -> None:
        for shard in self._shards:
            shard.close()


def read_into(weight: torch.Tensor, tensors: Iterable[StoredTensor], scratch: torch.Tensor) -> None:
    """Fills a contiguous weight with tensors one after the other, in parts."""
    rest = weight.view(-1)
    for stored in tensors:
        offset, itemsize = stored.offset, stored.dtype.itemsize
        piece, rest = rest[: stored.numel], rest[stored.numel :]
        for part in torch.split(piece, (len(scratch) - 2 * BLOCK) // itemsize):
            num_bytes, skip = part.numel() * itemsize, offset % BLOCK
            stored.shard.read(offset - skip, scratch[: in_blocks(skip + num_bytes)])
            raw = scratch[skip : skip + num_bytes]
            raw = raw if skip % itemsize == 0 else raw.clone()  # torch wants an aligned address.
            part.copy_(raw.view(stored.dtype))
            offset += num_bytes


def new_scratch() -> torch.Tensor:
    """A scratch buffer that is large enough for any weight."""
    return aligned_buffer(_PART + 2 * BLOCK)
