"""What is read off logits: the likeliest token at a node, and the K likeliest ones.

The results are the same on every device. On a CPU they are computed in other ways, since torch's
are many times slower over a real vocabulary, and slower still in half precision.
"""

from __future__ import annotations

import threading

import torch

# In a smaller vocabulary one look at everything costs less than looking at blocks first.
_LEAST_VOCABULARY = 1 << 14
_BLOCK = 64
# On a CPU up to 2**18 numbers are worked on as a whole, and larger arrays in parts of 2**20, for
# which two buffers of 4 MB are kept: to get fresh pages takes longer than to fill them.
_WHOLE = 1 << 18
_NUM_AT_A_TIME = 1 << 20


class _Scratch(threading.local):
    """A float32 buffer on the CPU that a thread keeps, since a new one takes longer to get."""

    _buffer: torch.Tensor | None = None

    def buffer(self, *shape: int) -> torch.Tensor:
        """This thread's buffer in a shape; it overwrites what the last call returned."""
        size = torch.Size(shape).numel()
        if self._buffer is None or len(self._buffer) < size:
            with torch.inference_mode(False):  # So both modes may write to it.
                self._buffer = torch.empty(
                    max(size, 2 * _NUM_AT_A_TIME), dtype=torch.float32, device="cpu"
                )
        return self._buffer[:size].view(shape)


_SCRATCH = _Scratch()


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token at every node, of equal ones the first; waits for nothing."""
    if logits.dtype == torch.float64:
        logits = logits.float()  # transformers rounds first, which may make two of them equal.
    return logits.argmax(-1)


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (..., K) of the K likeliest, likeliest first, and their probabilities; no waiting.

    If a node's logits have NaN or infinity, its ids may be any, and their probabilities are NaN.
    """
    k = min(k, logits.shape[-1])
    if logits.device.type == "cpu" and logits.numel() > _WHOLE:
        return _top_k_by_parts(logits, k)
    probabilities, ids = largest(logits.softmax(-1, dtype=torch.float32), k)
    return ids, probabilities


def _top_k_by_parts(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some nodes at a time, in memory that this thread keeps."""
    nodes = logits.reshape(-1, logits.shape[-1])
    step = max(_NUM_AT_A_TIME // nodes.shape[-1], 1)
    ids, highest = [], []
    for first in range(0, len(nodes), step):
        part = nodes[first : first + step]
        read, probabilities = _SCRATCH.buffer(2, *part.shape)
        torch.softmax(read.copy_(part), -1, out=probabilities)
        values, indices = largest(probabilities, k)
        highest.append(values)
        ids.append(indices)
    shape = (*logits.shape[:-1], k)
    return torch.cat(ids).view(shape), torch.cat(highest).view(shape)


def largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest and where they are, the largest first.

    On a CPU a wide row is cut into blocks. The K largest lie in the K blocks with the largest
    maxima, or after the last whole block, and only those are searched.
    """
    num_blocks, num_behind = divmod(values.shape[-1], _BLOCK)
    if values.device.type != "cpu" or values.shape[-1] < _LEAST_VOCABULARY or k > num_blocks:
        return values.topk(k, dim=-1)
    end = num_blocks * _BLOCK
    maxima = values[..., :end].reshape(*values.shape[:-1], num_blocks, _BLOCK).amax(-1)
    blocks = maxima.topk(k, dim=-1).indices
    candidates = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK, device="cpu")).flatten(-2)
    if num_behind:
        rest = torch.arange(end, values.shape[-1], device="cpu")
        candidates = torch.cat([candidates, rest.expand(*candidates.shape[:-1], -1)], dim=-1)
    highest, chosen = values.gather(-1, candidates).topk(k, dim=-1)
    return highest, candidates.gather(-1, chosen)
