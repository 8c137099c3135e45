"""What the answer will probably look like: a text of the caller's. Serves one call."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.draft.sources.following import SURE, Following, FollowingCursor, IndexedText
from selfspec.draft.sources.source import RowStart, Source


class Prediction(Source):
    """The tokens of a prediction and where each of them occurs; rows may share one."""

    name = "prediction"

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.text = IndexedText(token_ids)

    def open(self, row: RowStart) -> FollowingCursor:
        """A cursor in front of the answer's first token, which is expected with some trust."""
        front = Following(((0, SURE - 1),), left=0, ahead=0)
        return FollowingCursor(self.name, self.text, front)
