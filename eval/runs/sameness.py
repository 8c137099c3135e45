"""Whether a text is stock's, and where it is not, how near a tie the two tokens were.

identical     every token
near-tie      at the first other token, stock's logits put both within 4 ulps of the dtype, taken
              of the largest logit, whose sums are rounded alike: forwards of different widths
              round differently, and either may come first
different     anything else; under sampling every other token is
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

MAX_ULPS = 4


class Verdict(NamedTuple):
    """`differs_at` is the first other token, counted from 0 after the prompt; `gap_ulps` says how
    far apart stock's logits put the two, and is None where one text ends: no rounding does that.
    """

    same: str
    differs_at: int | None = None
    gap_ulps: float | None = None


def compare(
    model: Any, prompt: Sequence[int], stock: Sequence[int], other: Sequence[int], *, greedy: bool
) -> Verdict:
    """The verdict on new ids; costs a forward over the common tokens where they differ."""
    at = first_difference(stock, other)
    if at is None:
        return Verdict("identical")
    if not greedy or at == min(len(stock), len(other)):
        return Verdict("different", at)
    logits = _last_logits(model, [*prompt, *stock[:at]])
    pair = logits[[stock[at], other[at]]].float()
    ulps = float((pair[0] - pair[1]).abs()) / ulp(float(logits.float().abs().max()), model.dtype)
    return Verdict("near-tie" if ulps <= MAX_ULPS else "different", at, round(ulps, 2))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two texts differ, be it that one has ended; None: nowhere."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((index for index, (a, b) in pairs if a != b), shorter)


def ulp(value: float, dtype: torch.dtype) -> float:
    """The step from a number of this size to the next one."""
    info = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(max(abs(value), info.tiny))) * info.eps


@torch.no_grad()
def _last_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """(V,): after `ids`."""
    logits: torch.Tensor = model(
        torch.tensor([list(ids)], device=model.device), logits_to_keep=1
    ).logits[0, -1]
    return logits
