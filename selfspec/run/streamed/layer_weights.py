"""The weights of one layer: how they lie in a buffer, and how they are read from their files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from selfspec.run.streamed.files import StoredTensor

__all__ = ["LayerWeights", "Weight", "new_scratch", "read_into"]

_PART = 1 << 22  # At most this many bytes are converted at a time.
_ALIGNMENT = 64  # Each weight begins at a multiple of this many bytes.


class Weight(NamedTuple):
    """A weight of a model: its dtype and shape there, and where the files hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: Sequence[StoredTensor]  # Joined, they are the weight.

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes in memory."""
        return prod(self.shape) * self.dtype.itemsize


class LayerWeights:
    """The weights of a layer in a buffer of `num_bytes`; `num_read` bytes are read for them."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = weights
        sizes = (-(-each.num_bytes // _ALIGNMENT) * _ALIGNMENT for each in weights)
        *self._starts, self.num_bytes = accumulate(sizes, initial=0)
        self.num_read = sum(tensor.num_bytes for each in weights for tensor in each.tensors)

    @property
    def scratch_bytes(self) -> int:
        """How large a scratch buffer `fill` needs: 0 if nothing is converted."""
        converted = (
            tensor.num_bytes
            for weight in self._weights
            for tensor in weight.tensors
            if tensor.dtype is not weight.dtype
        )
        return min(max(converted, default=0), _PART)

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
        for view, weight in zip(self.views(buffer), self._weights, strict=True):
            read_into(view, weight.tensors, scratch)


def read_into(weight: torch.Tensor, tensors: Iterable[StoredTensor], scratch: torch.Tensor) -> None:
    """Fills a contiguous weight with tensors, one after the other, from its first element on.

    What has another dtype, or goes to another device, passes through `scratch` (N,) in parts.
    """
    flat = weight.view(-1)
    for stored in tensors:
        piece, flat = flat[: stored.numel], flat[stored.numel :]
        if stored.dtype is piece.dtype and piece.device.type == "cpu":
            stored.shard.read(stored.offset, piece)
            continue
        offset = stored.offset
        for part in torch.split(piece, max(1, len(scratch) // stored.dtype.itemsize)):
            raw = scratch[: part.numel() * stored.dtype.itemsize]
            stored.shard.read(offset, raw)
            part.copy_(raw.view(stored.dtype))
            offset += len(raw)


def new_scratch() -> torch.Tensor:
    """A scratch buffer that is large enough for any weight."""
    return torch.empty(_PART, dtype=torch.uint8, device="cpu")
