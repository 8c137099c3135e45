"""What is read off logits: the likeliest token of each place, and its K likeliest.

The same on every device, by the ways that are fast there: over a real vocabulary a CPU's own are
many times slower than they need to be, and in half precision slower still.
"""

from __future__ import annotations

import torch

from selfspec.machine.scratch import Scratch

__all__ = ["as_read", "fits_at_once", "largest", "likeliest", "top_k"]

_LEAST_VOCABULARY = 1 << 14  # for smaller ones a look at everything costs less than two steps do
_BLOCK = 64
_AT_ONCE = 1 << 18  # numbers
_ROOM = 1 << 20  # numbers worked on at a time where it is more: two of 4 MB

_SCRATCH = Scratch(2 * _ROOM)


def as_read(logits: torch.Tensor) -> torch.Tensor:
    """As float32 on a CPU, which reads that fastest, and which stock's loop makes of them, too."""
    return logits.float() if logits.device.type == "cpu" else logits


def fits_at_once(logits: torch.Tensor) -> bool:
    """Is it little enough to be worked on as a whole?

    More than that takes megabytes each time, and for a system to hand out so many new pages takes
    longer than to fill them.
    """
    return logits.device.type != "cpu" or logits.numel() <= _AT_ONCE


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest at each place; waits for nothing."""
    if logits.dtype == torch.float64:  # stock rounds first, and what rounds alike is a tie
        logits = logits.float()
    return logits.argmax(-1)


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (..., K) of the K likeliest, likeliest first, and their probabilities; no waiting.

    Where the model says NaN or infinity, which ids come is left open, and their probability is NaN.
    """
    k = min(k, logits.shape[-1])
    if not fits_at_once(logits):
        return _top_k_by_parts(logits, k)
    probabilities, ids = largest(logits.softmax(-1, dtype=torch.float32), k)
    return ids, probabilities


def _top_k_by_parts(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some places at a time, in memory that each thread keeps."""
    places = logits.reshape(-1, logits.shape[-1])
    step = max(_ROOM // places.shape[-1], 1)
    ids, highest = [], []
    for first in range(0, len(places), step):
        part = places[first : first + step]
        read, probabilities = _SCRATCH.room(2, *part.shape)
        torch.softmax(read.copy_(part), -1, out=probabilities)
        found = largest(probabilities, k)
        highest.append(found[0])
        ids.append(found[1])
    shape = (*logits.shape[:-1], k)
    return torch.cat(ids).view(shape), torch.cat(highest).view(shape)


def largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest and where they are, the largest first.

    On a CPU a wide row is cut into blocks. The K largest lie in the K blocks with the largest
    heads, or behind the last whole block, and only there is looked further.
    """
    num_blocks, num_behind = divmod(values.shape[-1], _BLOCK)
    if values.device.type != "cpu" or values.shape[-1] < _LEAST_VOCABULARY or k > num_blocks:
        return values.topk(k, dim=-1)
    behind = num_blocks * _BLOCK
    heads = values[..., :behind].reshape(*values.shape[:-1], num_blocks, _BLOCK).amax(-1)
    blocks = heads.topk(k, dim=-1).indices
    places = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(-2)
    if num_behind:
        rest = torch.arange(behind, values.shape[-1])
        places = torch.cat([places, rest.expand(*places.shape[:-1], -1)], dim=-1)
    highest, chosen = values.gather(-1, places).topk(k, dim=-1)
    return highest, places.gather(-1, chosen)
