"""Which tree a row drafts, where chance alone does not decide.

Knows chances, depths and ranks; not what a token means.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.records import DraftTree, StepRecord

__all__ = ["Place", "Shape"]

# A node below the root: the number of its parent, and its rank among the parent's candidates from
# 0. Nodes are numbered as in a tree: 0 is the root, and place i is node i + 1.
Place = tuple[int, int]


class Shape:
    """The shape of a row's trees. This one lets the likeliest node grow next, until none pays.

    A shape of your own overrides what it needs; it can't change the text. `SelfSpec(shape=...)`
    takes it. For each row, `open` is asked for the shape of that row alone.
    """

    # The most nodes that `hang` adds to a tree.
    num_beside: int = 0

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> Shape:
        """The shape of one row. One that keeps something from step to step returns a copy."""
        return self

    def score(self, chance: float, depth: int, rank: int) -> float | None:
        """What a node counts for; None leaves it out, with the siblings behind it.

        `chance` is the score of its parent times its own chance, `depth` is 1 below the root, and
        `rank` is 0 for the likeliest sibling. A score is at most its chance.
        """
        return chance

    def turn(self, score: float, depth: int) -> float:
        """The node with the largest turn is added next."""
        return score

    def places(self) -> Sequence[Place]:
        """Places to be filled with the newest candidates, parents first; none: the tree grows."""
        return ()

    def keep(self, places: Sequence[Place]) -> None:
        """Told the places of a tree that grew."""

    def hang(self, tree: DraftTree, max_depth: int, room: int) -> None:
        """Adds nodes of score 0 beside those of the tree: at most `room` of them.

        What stands more than `max_depth` tokens behind the root is never reached.
        """

    def observe(self, record: StepRecord) -> None:
        """Sees what came of a step, before sources do."""
