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
    """Ids (..., K) of the K likeliest, likeliest first, and their probabilities; no waiting."""
    logits = as_read(logits)
    ids = _likeliest_ids(logits, min(k, logits.shape[-1]))
    probabilities = logits.softmax(-1, dtype=torch.float32).gather(-1, ids)
    # where the model says NaN or infinity, stock goes on, and so must the tables
    return ids, probabilities.nan_to_num_(nan=0.0)


def _likeliest_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The ids alone.

    On a CPU a wide row is cut into blocks. The K likeliest lie in the K blocks with the largest
    heads, or behind the last whole block, and only there is looked further.
    """
    num_blocks, num_behind = divmod(logits.shape[-1], _BLOCK)
    if logits.device.type != "cpu" or logits.shape[-1] < _LEAST_VOCABULARY or k > num_blocks:
        return logits.topk(k, dim=-1).indices
    behind = num_blocks * _BLOCK
    heads = logits[..., :behind].reshape(*logits.shape[:-1], num_blocks, _BLOCK).amax(-1)
    blocks = heads.topk(k, dim=-1).indices
    ids = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(-2)
    if num_behind:
        rest = torch.arange(behind, logits.shape[-1])
        ids = torch.cat([ids, rest.expand(*ids.shape[:-1], -1)], dim=-1)
    return ids.gather(-1, logits.gather(-1, ids).topk(k, dim=-1).indices)
