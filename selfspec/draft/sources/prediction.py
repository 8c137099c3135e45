"""What the answer will probably look like: a text of the caller's. Serves one call."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.draft.sources.following import SURE, Following, FollowingCursor, IndexedText
from selfspec.draft.sources.source import RowStart, Source

# At most 4 places are known, so that no more tokens are named.
_MOST_MATCHES = 4


class Prediction(Source):
    """The tokens of a prediction and where each of them occurs; rows may share one."""

    name = "prediction"

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.text = IndexedText(token_ids)

    def open(self, row: RowStart) -> FollowingCursor:
        """A cursor in front of the answer's first token, which is expected with some trust."""
        front = Following(((0, SURE - 1),), left=0, ahead=0)
        knobs = {"most_matches": _MOST_MATCHES, "top_k": _MOST_MATCHES}
        return FollowingCursor(self.name, self.text, front, **knobs)
