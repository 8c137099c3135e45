"""What is read off logits: the likeliest token of each place, and its K likeliest.

The same on every device, by the ways that are fast there: over a real vocabulary a CPU's own are
many times slower than they need to be, and in half precision slower still.
"""

from __future__ import annotations

import torch

__all__ = ["as_read", "likeliest", "top_k"]

_LEAST_VOCABULARY = 1 << 14  # for smaller ones a look at everything costs less than two steps do
_BLOCK = 64


def as_read(logits: torch.Tensor) -> torch.Tensor:
    """As float32 on a CPU, which reads that fastest, and which stock's loop makes of them, too."""
    return logits.float() if logits.device.type == "cpu" else logits


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest at each place; waits for nothing."""
    if logits.dtype == torch.float64:  # stock rounds first, and what rounds alike is a tie
        logits = logits.float()
    return logits.argmax(-1)


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (..., K) of the K likeliest, likeliest first, and their probabilities; no waiting.

    Where the model says NaN or infinity, which ids come is left open, and their probability is NaN.
    """
    probabilities = logits.softmax(-1, dtype=torch.float32)
    largest, ids = _largest(probabilities, min(k, logits.shape[-1]))
    return ids, largest


def _largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest and where they are.

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
    largest, chosen = values.gather(-1, places).topk(k, dim=-1)
    return largest, places.gather(-1, chosen)
