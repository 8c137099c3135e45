"""Is it the same text? And where not: where does it part, and how near were the two tokens?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from selfspec.cli.prefix import first_difference
from selfspec.cli.timing import Timed
from selfspec.cli.writer import Writer

__all__ = ["Difference", "differences", "explain"]

_ROUNDINGS = 4  # of the logits' dtype: as far as two widths of a forward may well be apart


class Difference(NamedTuple):
    """Where a drafted text left the stock one."""

    snippet: int
    position: int
    expected: list[int]
    got: list[int]


def differences(timed: Sequence[Timed], shown: Sequence[Sequence[int]]) -> list[Difference]:
    """Every text that is not stock's, those `shown` live among them; at most one a snippet."""
    found = []
    for place, (runs, live_ids) in enumerate(zip(timed, shown, strict=True)):
        expected = runs.stock[0].new_ids
        for got in (live_ids, *(run.new_ids for run in runs.drafted)):
            position = first_difference(expected, got)
            if position is not None:
                found.append(Difference(place, position, expected, list(got)))
                break
    return found


def explain(writer: Writer, prompt_ids: Sequence[int], difference: Difference) -> str:
    """One line on a difference: the position, both tokens, and how near the logits are there."""
    _, position, expected, got = difference
    pair = [ids[position] if position < len(ids) else None for ids in (expected, got)]
    texts = ["the end" if i is None else repr(writer.tokenizer.decode([i])) for i in pair]
    line = f"token {position + 1} differs: stock {texts[0]}, selfspec {texts[1]}"
    ids = [i for i in pair if i is not None]
    if writer.samples or len(ids) < 2:
        return line
    return f"{line}; {_nearness(writer, [*prompt_ids, *expected[:position]], ids)}"


def _nearness(writer: Writer, ids: Sequence[int], pair: Sequence[int]) -> str:
    """The two tokens' logits in a plain forward, and whether rounding could swap them."""
    import torch

    with torch.no_grad():
        logits = writer.model(torch.tensor([list(ids)], device=writer.model.device)).logits[0, -1]
    left, right = logits[list(pair)].float().tolist()
    allowed = _ROUNDINGS * torch.finfo(logits.dtype).eps * max(abs(left), abs(right))
    dtype = str(logits.dtype).removeprefix("torch.")
    verdict = "a near-tie" if abs(left - right) <= allowed else "not a near-tie"
    return f"their logits are {left:.4g} and {right:.4g}, {verdict} in {dtype}"
