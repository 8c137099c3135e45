"""Tokens after which nothing can be verified."""

from __future__ import annotations

from collections.abc import Iterable

from selfspec.draft.sources.source import Cursor
from selfspec.records import Candidate, StepRecord

__all__ = ["PadGuard"]


class PadGuard(Cursor):
    """Lets no draft be a pad, nor follow one.

    Some models place a token by how many tokens of its forward are no pads, and by all columns that
    the KV holds. After a pad, a plain step and a chain would give it different positions.
    """

    is_guard = True

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id
        self._is_after_pad = False

    def root(self) -> bool:
        """Is the last token of the text a pad?"""
        return self._is_after_pad

    def expand(self, state: bool) -> list[Candidate]:
        """Nothing: it drafts no token itself."""
        return []

    def possible(self, state: bool, tokens: Iterable[int]) -> list[int]:
        """All but pads; none after a pad."""
        return [] if state else [token for token in tokens if token != self._pad_id]

    def follow(self, state: bool, token: int) -> bool:
        """No drafted token is a pad."""
        return False

    def observe(self, record: StepRecord) -> None:
        """Looks at the last token that was committed."""
        self._is_after_pad = record.committed_ids[-1] == self._pad_id
