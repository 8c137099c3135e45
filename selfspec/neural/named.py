"""What a model that drafts names after a token, with its margin as evidence."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from selfspec.records import DRAFT_MODEL, MAX_BIN, Candidate, Draws, Evidence, Likely

if TYPE_CHECKING:
    import torch

# A margin is how many times as large the best p / q is as another one; its log, in halvings.
_MARGINS = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
_TINY = 1e-30  # No weight is smaller.
_FARTHEST = 7.0  # What is farther behind the best one is not named.

# What the model does not name after a token that it has read is unlikely.
AGAINST = Evidence(DRAFT_MODEL, rank=0, probability_bin=MAX_BIN)


def ranked(logits: torch.Tensor, num: int, draws: Draws, depth: int) -> Likely:
    """The tokens that a model would choose or draw by `logits` (V,), with the weight of each.

    Where the noise to come is known, they are ranked by p / q, else by p.
    """
    likely = draws.ranked(logits, depth)
    if likely is None:
        top = logits.float().topk(min(num, len(logits)))
        weights = (top.values - top.values[0]).exp().nan_to_num(0.0)
        likely = list(zip(top.indices.tolist(), weights.tolist(), strict=True))
    return likely[:num]


def named(likely: Likely, *, is_drawn: bool) -> list[Candidate]:
    """The candidates that a model names, the first one likeliest, with its margin as evidence."""
    halvings = [math.log2(max(weight, _TINY)) for _, weight in likely]
    candidates = []
    for rank, (token, _) in enumerate(likely, 1):
        behind = halvings[0] - halvings[rank - 1]
        if rank == 1:
            ahead = halvings[0] - halvings[1] if len(halvings) > 1 else math.inf
            # The surer, the longer the match that such a margin is worth at first.
            evidence = Evidence(DRAFT_MODEL, 2 + bisect_right(_MARGINS, ahead), 1, int(is_drawn))
        elif behind <= _FARTHEST:
            halved = min(1 + int(behind), MAX_BIN)
            evidence = Evidence(DRAFT_MODEL, 0, rank, int(is_drawn), halved)
        else:
            break
        candidates.append((token, evidence))
    return candidates
