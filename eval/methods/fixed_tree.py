"""The shape of a LUT tree of 80 nodes that never changes, after Token Recycling.

Whatever the tables say, only places of the shape are drafted; where a row is empty, what would hang
there is left out.
"""

from __future__ import annotations

from functools import cache

from selfspec.draft.fitted import FittedTree
from selfspec.fitting import Path, best_tree, fitted

__all__ = ["NUM_DRAFTED", "NUM_RANKS", "fixed_shape"]

NUM_DRAFTED = 80  # Token Recycling's
# How often the entries of a LUT's row came true, by depth; deeper levels are like the last one.
# Counted by `selfspec.building.tuning` with the LUT alone, on 16 questions of MT-bench with 48 new
# tokens each (SmolLM2-135M-Instruct, float32).
_RATES = ((0.46, 0.17, 0.09, 0.06, 0.042, 0.032, 0.025, 0.02),)
NUM_RANKS = len(_RATES[0])


@cache
def fixed_shape() -> FittedTree:
    """The likeliest 80 places."""

    def rates(path: Path) -> tuple[float, ...]:
        return _RATES[min(len(path), len(_RATES) - 1)]

    return fitted(best_tree(rates, NUM_DRAFTED))
