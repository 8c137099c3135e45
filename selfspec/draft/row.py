"""One row of the batch as drafting sees it: its cursors, its tree, its branches.

Knows what was committed to the row; not the other rows, nor how a token is verified.
"""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.config import SpecConfig
from selfspec.draft.memory import Memory
from selfspec.draft.sources import Cursor
from selfspec.draft.sources.branches import Branches
from selfspec.draft.sources.draft_model import DraftModelCursor
from selfspec.draft.sources.prediction import Prediction, PredictionCursor
from selfspec.draft.tree import TreeGrower
from selfspec.records import StepRecord

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

    def observe(self, record: StepRecord) -> None:
        """Moves behind the committed tokens and lets every cursor learn."""
        self.last_token = record.committed_ids[-1]
        self.branches.observe(record)  # The context learns its n-grams.
        for cursor in self.cursors:
            cursor.observe(record)
