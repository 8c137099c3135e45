"""How a layer's weights lie in a buffer, and how they get there from the files.

What the files hold as the model wants it is read straight into the buffer, together with its
neighbours. What must be converted or joined goes through a scratch buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from selfspec.run.streamed.files import BLOCK, Shard, StoredTensor, aligned_buffer, bytes_of

__all__ = ["Image", "Weight", "copy_into", "new_scratch"]

_PART = 1 << 22  # So many bytes are converted at a time, or fewer.
_ALIGNMENT = 64  # bytes, for weights that don't lie in the buffer as they do in the file


class Weight(NamedTuple):
    """A weight of a model: its dtype and shape there, and where the files hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: Sequence[StoredTensor]  # one behind the other


class _Run(NamedTuple):
    """Bytes that are read in one go; all three are multiples of `BLOCK`."""

    shard: Shard
    start: int  # in the file
    into: int  # in the buffer
    num_bytes: int


class Image:
    """One layer's weights in a buffer of `num_bytes`; `num_read` bytes are read for them."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = weights
        self._offsets: dict[int, int] = {}  # of each weight in the buffer, by index
        self._runs: list[_Run] = []
        self.num_bytes = 0
        direct = {i: each.tensors[0] for i, each in enumerate(weights) if _is_direct(each)}
        self._lay_out_runs(direct)
        self._copied = [i for i in range(len(weights)) if i not in direct]
        for index in self._copied:
            self._offsets[index] = self.num_bytes
            self.num_bytes += -(-_num_bytes(weights[index]) // _ALIGNMENT) * _ALIGNMENT
        copied = (t.num_bytes for i in self._copied for t in weights[i].tensors)
        self.num_read = sum(run.num_bytes for run in self._runs) + sum(copied)

    @property
    def scratch_bytes(self) -> int:
        """How large a scratch buffer `fill` needs: 0 if nothing is converted or joined."""
        tensors = [tensor for index in self._copied for tensor in self._weights[index].tensors]
        longest = max((tensor.num_bytes for tensor in tensors), default=0)
        return min(longest, _PART) + 2 * BLOCK if tensors else 0

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The weights as they lie in a buffer (N,) of bytes."""
        return [
            buffer[start : start + _num_bytes(weight)].view(weight.dtype).view(weight.shape)
            for weight, start in (
                (self._weights[i], self._offsets[i]) for i in sorted(self._offsets)
            )
        ]

    def fill(self, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        """Reads all weights into a buffer on the CPU."""
        for shard in {tensor.shard for weight in self._weights for tensor in weight.tensors}:
            shard.check()
        raw = bytes_of(buffer)
        for run in self._runs:
            run.shard.read(run.start, raw[run.into : run.into + run.num_bytes])
        if self._copied:
            views = self.views(buffer)
            for index in self._copied:
                copy_into(views[index], self._weights[index].tensors, scratch)

    def _lay_out_runs(self, direct: Mapping[int, StoredTensor]) -> None:
        """Gives each weight its offset; neighbours in a file are neighbours in the buffer."""
        end: tuple[Shard, int] | None = None
        for index in sorted(direct, key=lambda i: (str(direct[i].shard.path), direct[i].offset)):
            tensor = direct[index]
            is_neighbour = end is not None and end[0] is tensor.shard and tensor.offset <= end[1]
            run = self._runs.pop() if is_neighbour else self._new_run(tensor)
            end = (tensor.shard, -(-(tensor.offset + tensor.num_bytes) // BLOCK) * BLOCK)
            self._runs.append(run._replace(num_bytes=max(run.num_bytes, end[1] - run.start)))
            self._offsets[index] = run.into + tensor.offset - run.start
            self.num_bytes = run.into + self._runs[-1].num_bytes

    def _new_run(self, tensor: StoredTensor) -> _Run:
        return _Run(tensor.shard, tensor.offset // BLOCK * BLOCK, self.num_bytes, 0)


def copy_into(weight: torch.Tensor, tensors: Iterable[StoredTensor], scratch: torch.Tensor) -> None:
    """Reads a contiguous weight in parts, and converts them to its dtype, onto its device."""
    raw, rest = bytes_of(scratch), weight.view(-1)
    for stored in tensors:
        itemsize = stored.dtype.itemsize
        per_part = (len(raw) - 2 * BLOCK) // itemsize
        for first in range(0, stored.numel, per_part):
            number = min(per_part, stored.numel - first)
            offset = stored.offset + first * itemsize
            aligned, skip = offset // BLOCK * BLOCK, offset % BLOCK
            num_bytes = -(-(skip + number * itemsize) // BLOCK) * BLOCK
            stored.shard.read(aligned, raw[:num_bytes])
            part = scratch[skip : skip + number * itemsize]
            # The bytes may begin at any address, which a view in another dtype does not allow.
            part = part if skip % itemsize == 0 else part.clone()
            rest[:number].copy_(part.view(stored.dtype))
            rest = rest[number:]


def new_scratch() -> torch.Tensor:
    """A scratch buffer that is large enough for any weight."""
    return aligned_buffer(_PART + 2 * BLOCK)


def _is_direct(weight: Weight) -> bool:
    first, *others = weight.tensors
    is_aligned = first.offset % weight.dtype.itemsize == 0
    return not others and first.dtype is weight.dtype and is_aligned


def _num_bytes(weight: Weight) -> int:
    return torch.Size(weight.shape).numel() * weight.dtype.itemsize
