"""The shape of a LUT tree of 80 nodes that never changes, after Token Recycling.

Whatever the tables say, only places of the shape are drafted; where a row is empty, what would hang
there is left out.
"""

from __future__ import annotations

from functools import cache

from eval.papers.fit_tree import best_tree
from selfspec.draft.fitted import FittedTree

NUM_DRAFTED = 80  # Token Recycling's
# How often the entries of a LUT's row came true, by rank, whatever the depth: counted as the first
# round of `python -m eval fit` does, with the LUT alone, on 16 questions of MT-bench, 48 new tokens
# each (SmolLM2-135M-Instruct, float32).
_RANK_RATES = (0.323, 0.075, 0.049, 0.031, 0.017, 0.019, 0.032, 0.007)
NUM_RANKS = len(_RANK_RATES)


@cache
def fixed_shape() -> FittedTree:
    """The likeliest 80 places."""
    return best_tree(lambda _: _RANK_RATES, NUM_DRAFTED)
