"""The weights of one layer: how they lie in a buffer, and how they are read from their files.

A large tensor that the file holds as the model wants it is read straight into the buffer. What is
small, or must be converted or joined, passes through a scratch buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from selfspec.run.streamed.files import BLOCK, StoredTensor, aligned_buffer, in_blocks

__all__ = ["LayerWeights", "Weight", "new_scratch", "read_into"]

_PART = 1 << 22  # At most this many bytes are converted at a time.
_LEAST = 1 << 16  # Weights of fewer bytes are not read directly, since whole blocks are too much.
_ALIGNMENT = 64  # Weights that are not read directly begin at a multiple of this many bytes.


class Weight(NamedTuple):
    """A weight of a model: its dtype and shape there, and where the files hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: Sequence[StoredTensor]  # Joined, they are the weight.

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes in memory."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def skip(self) -> int | None:
        """Where its bytes begin in the first block that is read; None if it is not read directly.

        torch needs an address that is a multiple of the size of an element.
        """
        first, *others = self.tensors
        is_copied = others or first.dtype is not self.dtype or self.num_bytes < _LEAST
        return None if is_copied or first.offset % self.dtype.itemsize else first.offset % BLOCK


class LayerWeights:
    """The weights of a layer in a buffer of `num_bytes`; `num_read` bytes are read for them."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = weights
        self._starts: list[int] = []  # of each weight in the buffer
        self.num_bytes = 0
        for weight in weights:
            if (skip := weight.skip) is None:
                self._starts.append(self.num_bytes)
                self.num_bytes += -(-weight.num_bytes // _ALIGNMENT) * _ALIGNMENT
            else:
                first = in_blocks(self.num_bytes)
                self._starts.append(first + skip)
                self.num_bytes = first + in_blocks(skip + weight.num_bytes)
        self.num_read = sum(tensor.num_bytes for each in weights for tensor in each.tensors)

    @property
    def scratch_bytes(self) -> int:
        """How large a scratch buffer `fill` needs: 0 if all weights are read directly."""
        others = [each for each in self._weights if each.skip is None]
        sizes = [tensor.num_bytes for weight in others for tensor in weight.tensors]
        return min(max(sizes), _PART) + 2 * BLOCK if sizes else 0

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The weights as they lie in a buffer (N,) of bytes."""
        return [
            buffer[start : start + weight.num_bytes].view(weight.dtype).view(weight.shape)
            for weight, start in zip(self._weights, self._starts, strict=True)
        ]

    def fill(self, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        """Reads all weights into a buffer on the CPU."""
        for shard in {tensor.shard for weight in self._weights for tensor in weight.tensors}:
            shard.check()
        views = self.views(buffer)
        for weight, view, start in zip(self._weights, views, self._starts, strict=True):
            if (skip := weight.skip) is None:
                read_into(view, weight.tensors, scratch)
            else:
                stored, first = weight.tensors[0], start - skip
                blocks = buffer[first : first + in_blocks(skip + weight.num_bytes)]
                stored.shard.read(stored.offset - skip, blocks)


def read_into(weight: torch.Tensor, tensors: Iterable[StoredTensor], scratch: torch.Tensor) -> None:
    """Fills a contiguous weight, on any device, with tensors one after the other, in parts."""
    rest = weight.view(-1)
    for stored in tensors:
        offset, itemsize = stored.offset, stored.dtype.itemsize
        piece, rest = rest[: stored.numel], rest[stored.numel :]
        for part in torch.split(piece, (len(scratch) - 2 * BLOCK) // itemsize):
            num_bytes, skip = part.numel() * itemsize, offset % BLOCK
            stored.shard.read(offset - skip, scratch[: in_blocks(skip + num_bytes)])
            raw = scratch[skip : skip + num_bytes]
            raw = raw if skip % itemsize == 0 else raw.clone()
            part.copy_(raw.view(stored.dtype))
            offset += num_bytes


def new_scratch() -> torch.Tensor:
    """A scratch buffer that is large enough for any weight."""
    return aligned_buffer(_PART + 2 * BLOCK)
