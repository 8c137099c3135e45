"""Whether a text is stock's, and where it is not, how near a tie the two tokens were.

identical     every token
near-tie      at the first other token, stock's logits put both within 4 ulps of the dtype:
              forwards of different widths round differently, and either may come first
different     anything else; under sampling every other token is
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

MAX_ULPS = 4

LogitsAt = Callable[[int], torch.Tensor]  # (V,): those from which the new token of an index came


class Parting(NamedTuple):
    """Where a text leaves stock's, and how far apart the two tokens were there.

    The gap is infinite where one text ends and the other does not: no rounding does that.
    """

    at: int  # the number of the new token, from 0
    gap: float  # in logits; 0 is a tie
    ulps: float  # of the likelier token's logit


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


def parting(
    stock: Sequence[int], other: Sequence[int], logits_at: LogitsAt, dtype: torch.dtype
) -> Parting | None:
    """Where new ids leave stock's; None: nowhere. Asks for the logits of that index alone."""
    at = first_difference(stock, other)
    if at is None:
        return None
    if at == min(len(stock), len(other)):
        return Parting(at, math.inf, math.inf)
    pair = logits_at(at)[[stock[at], other[at]]].float()
    gap = float((pair[0] - pair[1]).abs())
    return Parting(at, gap, gap / ulp(float(pair.abs().max()), dtype))


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


_BADNESS = ("identical", "near-tie", "different")


def _verdict(
    model: Any, prompt: Sequence[int], stock: Sequence[int], other: Sequence[int], *, greedy: bool
) -> Verdict:
    """The logits come from one forward over the prompt and the common tokens."""
    if not greedy:
        index = first_difference(stock, other)
        return Verdict("identical") if index is None else Verdict("different", index)
    found = parting(
        stock, other, lambda at: _last_logits(model, [*prompt, *stock[:at]]), model.dtype
    )
    if found is None:
        return Verdict("identical")
    same = "near-tie" if found.ulps <= MAX_ULPS else "different"
    return Verdict(same, found.at, None if math.isinf(found.ulps) else round(found.ulps, 2))


@torch.no_grad()
def _last_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """(V,): behind `ids`."""
    logits: torch.Tensor = model(
        torch.tensor([list(ids)], device=model.device), logits_to_keep=1
    ).logits[0, -1]
    return logits
