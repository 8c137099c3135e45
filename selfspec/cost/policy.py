"""How a step spends its width: all that is allowed, or what pays.

The engine asks before and while it drafts, and tells what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from selfspec.cost.budget import CoolDown, WidthSearch, best_width
from selfspec.cost.curve import CostCurve
from selfspec.records import DraftTree

__all__ = ["Budget", "FixedBudget", "MeasuredBudget"]


class Budget(Protocol):
    """What the engine asks in each step."""

    def max_nodes(self, allowed: int) -> int:
        """The most nodes that are worth looking for, of those allowed; asked once a step."""
        ...

    def search(self, max_nodes: int) -> Callable[[float], bool] | None:
        """Asked for each tree: says, score by score, whether its next node may pay."""
        ...

    def fit(self, trees: Sequence[DraftTree], max_nodes: int) -> None:
        """Cuts the trees of a batch to the width that pays for all of them."""
        ...

    def observe(self, width: int, seconds: float, num_accepted: int) -> None:
        """Told what a forward cost, and how many drafts it proved right."""
        ...


class FixedBudget:
    """Always all that is allowed."""

    def max_nodes(self, allowed: int) -> int:
        """All."""
        return allowed

    def search(self, max_nodes: int) -> None:
        """Nothing to ask: whatever is allowed is taken."""

    def fit(self, trees: Sequence[DraftTree], max_nodes: int) -> None:
        """Trees stay as they are."""

    def observe(self, width: int, seconds: float, num_accepted: int) -> None:
        """Nothing depends on it."""


class MeasuredBudget:
    """The width that brings the most tokens a second, by a measured curve; serves one call."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._cool_down = CoolDown()
        self._looks = True  # for drafts, in this step

    def max_nodes(self, allowed: int) -> int:
        """All, or 1 while drafting is left alone because it brought nothing."""
        self._looks = self._cool_down.may_draft()
        return allowed if self._looks else 1

    def search(self, max_nodes: int) -> Callable[[float], bool] | None:
        """Where growth may stop."""
        return WidthSearch(self._curve, max_nodes).take if max_nodes > 1 else None

    def fit(self, trees: Sequence[DraftTree], max_nodes: int) -> None:
        """All rows share a forward, and so its width."""
        width = best_width([tree.scores[1:] for tree in trees], self._curve, max_nodes).width
        for tree in trees:
            if len(tree) > width:
                tree.cut(width)

    def observe(self, width: int, seconds: float, num_accepted: int) -> None:
        """Refines the curve; a try that brought nothing counts towards leaving drafting alone."""
        self._curve.refine(width, seconds)
        if self._looks:
            self._cool_down.observe(num_accepted)
