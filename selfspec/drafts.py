"""The drafts of a step: a tree for each row, as wide as the budget lets all of them be.

Knows rows and what they draft from; nothing of the model or of how a forward is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from selfspec.cost import Step
from selfspec.records import DraftTree
from selfspec.row import Row
from selfspec.stats import Laps

Drafted = tuple[Row, DraftTree]


class Drafts(NamedTuple):
    """A tree for each row, and what drafting them took."""

    step: Step
    trees: list[Drafted]
    width: int  # of the forward
    seconds: float


def draft(rows: Sequence[Row], step: Step, laps: Laps) -> Drafts:
    """Grows a tree for each row; the step cuts them to the width that pays for all."""
    start, trees = laps.end("draft"), list[DraftTree]()
    for row in rows:
        tree = DraftTree.of_root(row.last_token)
        with row.guarded():
            limits = (min(step.max_nodes, row.most_nodes), row.max_depth, step.search())
            tree = row.drafter.draft(row.last_token, *limits)
        trees.append(tree)
    step.fit(trees)
    drafted = list(zip(rows, trees, strict=True))
    if any(row.is_padded for row in rows):
        _add_pads(drafted)
    return Drafts(step, drafted, max(map(len, trees)), laps.end("draft") - start)


def of_roots(rows: Sequence[Row]) -> list[Drafted]:
    """Trees without drafts."""
    return [(row, DraftTree.of_root(row.last_token)) for row in rows]


def _add_pads(drafted: Sequence[Drafted]) -> None:
    """Makes the trees of rows that are padded chains of pads, as deep as the deepest of all."""
    deepest = max(max(tree.depths) for _, tree in drafted)
    for row, tree in drafted:
        if row.is_padded:
            for node in range(deepest):
                tree.add(node, row.pad_token_id, 1.0)
