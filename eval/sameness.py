"""Whether an answer is stock's, and where it is not, how near a tie the tokens were.

    identical     every token
    near-tie      at the first other token, stock's logits put both within 4 ulps of the dtype:
                  forwards of different widths round differently, and either may come first
    different     anything else; under sampling every other token is

The logits come from one forward over the prompt and the common tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from eval.interleaved import first_difference
from eval.same_text import ulp

__all__ = ["MAX_ULPS", "Verdict", "compare", "gap_in_ulps"]

MAX_ULPS = 4


class Verdict(NamedTuple):
    """`differs_at` is the first other token, counted from 0 behind the prompt."""

    same: str
    differs_at: int | None = None
    gap_ulps: float | None = None


def compare(
    model: Any,
    prompts: Sequence[Sequence[int]],
    stock: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    *,
    greedy: bool,
) -> Verdict:
    """The verdict on new ids, of a batch the worst; costs a forward for each row that differs."""
    pairs = zip(prompts, stock, other, strict=True)
    verdicts = [_verdict(model, *row, greedy=greedy) for row in pairs]
    return max(verdicts, key=lambda verdict: _BADNESS.index(verdict.same))


_BADNESS = ("identical", "near-tie", "different")


def _verdict(
    model: Any, prompt: Sequence[int], stock: Sequence[int], other: Sequence[int], *, greedy: bool
) -> Verdict:
    place = first_difference(stock, other)
    if place is None:
        return Verdict("identical")
    if not greedy or place == min(len(stock), len(other)):  # one ended where the other went on
        return Verdict("different", place)
    gap = gap_in_ulps(model, [*prompt, *stock[:place]], stock[place], other[place])
    return Verdict("near-tie" if gap <= MAX_ULPS else "different", place, round(gap, 2))


@torch.no_grad()
def gap_in_ulps(model: Any, ids: Sequence[int], left: int, right: int) -> float:
    """How far apart the logits of two tokens are behind `ids`, in ulps of the likelier one."""
    logits = model(torch.tensor([list(ids)], device=model.device), logits_to_keep=1).logits[0, -1]
    pair = logits[[left, right]].float()
    return float((pair[0] - pair[1]).abs()) / ulp(float(pair.abs().max()), model.dtype)
