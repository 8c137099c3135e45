"""One row of the batch as drafting sees it: its cursors, its tree, its branches.

Knows what was committed to the row; not the other rows, nor how a token is verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selfspec.config import SpecConfig
from selfspec.draft.memory import Memory
from selfspec.draft.sources import Cursor
from selfspec.draft.sources.branches import Branches
from selfspec.draft.sources.draft_model import DraftModelCursor
from selfspec.draft.sources.prediction import Prediction, PredictionCursor
from selfspec.draft.tree import TreeGrower
from selfspec.records import StepRecord, TopK

__all__ = ["Row"]


@dataclass
class Row:
    """One sequence of the batch while it is being decoded."""

    index: int
    last_token: int
    cursors: list[Cursor]
    grower: TreeGrower
    branches: Branches
    memory: Memory

    @classmethod
    def open(
        cls,
        index: int,
        token_ids: list[int],
        memory: Memory,
        config: SpecConfig,
        prediction: Prediction | None = None,
        draft_model: DraftModelCursor | None = None,
    ) -> Row:
        """A row that has read its prompt, given without padding."""
        cursors = [source.open(token_ids, learns=memory.learns) for source in memory.sources]
        if prediction is not None:
            cursors.append(PredictionCursor(prediction))
        if draft_model is not None:
            cursors.append(draft_model)
        calibration = memory.calibration
        grower = TreeGrower(
            cursors, config, calibration.probability, calibration.trust, memory.fitted
        )
        num_branches = config.num_branches if memory.learns else 0
        branches = memory.branches(token_ids, num_branches, config.branch_length)
        return cls(index, token_ids[-1] if token_ids else 0, cursors, grower, branches, memory)

    def take_branches(self, record: StepRecord, tops: TopK, index: int) -> None:
        """Learns what the model said behind the branches' tokens.

        `tops` are a batch's, with this row's at `index`. What the model says behind a branch is as
        true as what it says in the tree, so every source learns it.
        """
        if not self.branches.tokens:
            return
        record.num_from_branches = self.branches.num_foreseen(record)
        pairs = self.branches.pairs(record.tree.tokens[0])
        if not pairs:
            return
        first = len(record.tree)
        top = tops.at((index, slice(first, first + len(pairs))))
        self.memory.observe_pairs(np.array(pairs, np.int64), top)
        record.num_branch_queries = len(pairs)
        record.grams = self.branches.take(top.ids[:, 0].tolist())

    def observe(self, record: StepRecord) -> None:
        """Moves behind the committed tokens and lets every cursor learn."""
        self.last_token = record.committed_ids[-1]
        for cursor in self.cursors:
            cursor.observe(record)
