"""Which tree a row drafts, where chance alone does not decide.

Knows chances, depths and ranks; not what a token means.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.draft.tree import TreeGrower
from selfspec.records import StepRecord


class Shape:
    """The shape of a row's trees. This one lets the likeliest node grow next, until none pays.

    A shape of your own overrides what it needs; it can't change the text. `SelfSpec(shape=...)`
    takes it. For each row, `for_row` is asked for the shape of that row alone.
    """

    def for_row(self, prompt_ids: Sequence[int], *, learns: bool) -> Shape:
        """The shape of one row. One that keeps something from step to step returns a copy."""
        return self

    def grow(self, grower: TreeGrower) -> None:
        """Grows the tree of a step by `best_first`, `fill` and `add` of the grower."""
        grower.best_first()

    def observe(self, record: StepRecord) -> None:
        """Sees the result of a step, before sources do."""
