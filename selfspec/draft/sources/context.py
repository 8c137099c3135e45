"""What the text of this request contains already: suffix matches.

Keeps every earlier position of prompt and output where the text before reads as it does at the end,
and for how many tokens. All of this belongs to one request: nothing reaches another row or call.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.draft.sources.following import Following, FollowingCursor, IndexedText
from selfspec.draft.sources.source import RowStart, Source
from selfspec.records import StepRecord

# Of all places that match the end of the text, only the 8 longest matches are remembered.
_MOST_MATCHES = 8
# When 10 tokens agree the text copies itself, and may do so with changes: shorter ones are chance.
_SURE = 10
# Matches of 4 tokens or more are the same evidence.
_LONGEST = 4
# No match at the end of a prompt counts as longer than this.
_LONGEST_IN_PROMPT = 64


class ContextSource(Source):
    name = "context"

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def open(self, row: RowStart) -> ContextCursor:
        return ContextCursor(row.prompt_ids, self._top_k)


class ContextCursor(FollowingCursor):
    """A row's text with the positions that match its end."""

    def __init__(self, prompt_ids: Sequence[int], top_k: int) -> None:
        start = max(len(prompt_ids) - _LONGEST_IN_PROMPT, 0)
        self._so_far = IndexedText(prompt_ids[:start], _MOST_MATCHES)
        knobs = {"most_matches": _MOST_MATCHES, "top_k": top_k, "sure": _SURE, "longest": _LONGEST}
        super().__init__("context", self._so_far, Following(), **knobs)
        for token in prompt_ids[start:]:
            self._append(token)

    def follow(self, state: Following, token: int) -> Following:
        """Drafts go on at the matches; other places count where there is none."""
        return self._followed(state, token, looks_around=False)

    def observe(self, record: StepRecord) -> None:
        for token in record.committed_ids:
            self._append(token)

    def _append(self, token: int) -> None:
        self._end = self._followed(self._end, token, looks_around=True)
        self._so_far.append(token)
