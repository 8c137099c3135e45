"""Compares texts with stock's: where do they part, and can rounding alone explain it?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from selfspec.cli.demo.timing import Timed
from selfspec.cli.shared.writer import Writer

# Logits of two widths of a forward may differ by this number of roundings in their dtype.
_ROUNDINGS = 4


class Difference(NamedTuple):
    """Where a drafted text left the stock one."""

    snippet: int
    position: int
    expected: list[int]
    got: list[int]


def differences(timed: Sequence[Timed], shown: Sequence[Sequence[int]]) -> list[Difference]:
    """At most one difference a snippet, of the text `shown` live and of all that were timed."""
    found = []
    for snippet, (runs, live_ids) in enumerate(zip(timed, shown, strict=True)):
        expected = runs.stock[0].new_ids
        for got in (live_ids, *(run.new_ids for run in runs.drafted)):
            if list(got) != expected:
                pairs = enumerate(zip_longest(expected, got))
                position = next(index for index, (one, other) in pairs if one != other)
                found.append(Difference(snippet, position, expected, list(got)))
                break
    return found


def explain(writer: Writer, prompt_ids: Sequence[int], difference: Difference) -> tuple[str, bool]:
    """A line on where the texts part, and whether the promise of the same text allows it.

    In half precision any difference is allowed: what a text is drawn from stays the same, and a
    single near-tie decides how it goes on. In float32 only a near-tie is.
    """
    _, position, expected, got = difference
    pair = [ids[position] if position < len(ids) else None for ids in (expected, got)]
    texts = ["the end" if i is None else repr(writer.tokenizer.decode([i])) for i in pair]
    line = f"token {position + 1} differs: stock {texts[0]}, selfspec {texts[1]}"
    ids = [i for i in pair if i is not None]
    if writer.samples or len(ids) < 2:
        return line, writer.in_half_precision
    nearness, is_tie = _nearness(writer, [*prompt_ids, *expected[:position]], ids)
    return f"{line}; {nearness}", is_tie or writer.in_half_precision


def _nearness(writer: Writer, ids: Sequence[int], pair: Sequence[int]) -> tuple[str, bool]:
    """The two tokens' logits in a plain forward, and whether rounding could swap them."""
    import torch

    with torch.no_grad():
        logits = writer.model(torch.tensor([list(ids)], device=writer.model.device)).logits[0, -1]
    left, right = logits[list(pair)].float().tolist()
    allowed = _ROUNDINGS * torch.finfo(logits.dtype).eps * max(abs(left), abs(right))
    is_tie = abs(left - right) <= allowed
    verdict = f"a near-tie in {writer.dtype}" if is_tie else f"not a near-tie in {writer.dtype}"
    return f"their logits are {left:.4g} and {right:.4g}, {verdict}", is_tie
