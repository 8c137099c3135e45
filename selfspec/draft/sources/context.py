"""What the text of this request contains already: suffix matches.

Keeps every earlier position of prompt and output where the text before reads as it does at the end,
and for how many tokens. All of this belongs to one request: nothing reaches another row or call.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from selfspec.draft.sources.matches import IndexedText, Match
from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import Candidate, Evidence, StepRecord

# Of the places that match the end of the text, the 32 longest matches are remembered.
_MAX_MATCHES = 32
# Matches of 4 tokens or more are the same evidence.
_MAX_MATCH_LENGTH = 4
# No match at the end of a prompt counts as longer than this.
_LONGEST_IN_PROMPT = 64


class ContextSource(Source):
    name = "context"

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def open(self, row: RowStart) -> ContextCursor:
        return ContextCursor(row.prompt_ids, self._top_k)


class ContextCursor(Cursor):
    """A row's text with the positions that match its end."""

    def __init__(self, prompt_ids: Sequence[int], top_k: int) -> None:
        start = max(len(prompt_ids) - _LONGEST_IN_PROMPT, 0)
        self._places = IndexedText(prompt_ids[:start])
        self._top_k = top_k
        self._matches: list[Match] = []
        for token in prompt_ids[start:]:
            self._append(token)

    def root(self) -> Sequence[Match]:
        return self._matches

    def expand(self, state: Sequence[Match]) -> list[Candidate]:
        """The token after each match: longest match first, then most frequent, then freshest."""
        longest: dict[int, int] = {}
        counts: dict[int, int] = {}
        for token, length in self._places.next_tokens(state):
            if length > longest.get(token, 0):
                longest[token] = length
            counts[token] = counts.get(token, 0) + 1
        ranked = list(longest)
        if len(ranked) > 1:
            ranked.sort(key=lambda token: (-longest[token], -counts[token]))
        return [
            (token, _evidence(min(longest[token], _MAX_MATCH_LENGTH), rank))
            for rank, token in enumerate(ranked[: self._top_k], start=1)
        ]

    def follow(self, state: Sequence[Match], token: int) -> Sequence[Match]:
        """The matches that the token continues, or else wherever the text has it."""
        longer = self._places.longer(state, token)
        return longer or [(p, 1) for p in reversed(self._places.after(token)[-_MAX_MATCHES:])]

    def observe(self, record: StepRecord) -> None:
        for token in record.committed_ids:
            self._append(token)

    def _append(self, token: int) -> None:
        """Moves the end by one token; costs at most two looks at each remembered match."""
        fresh = dict.fromkeys(self._places.after(token)[-_MAX_MATCHES:], 1)
        # An old but long match stays, however often the token came since.
        matches = list((fresh | dict(self._places.longer(self._matches, token))).items())
        if len(matches) > _MAX_MATCHES:
            matches = heapq.nlargest(_MAX_MATCHES, matches, key=lambda match: match[::-1])
        self._matches = sorted(matches, reverse=True)
        self._places.append(token)


@lru_cache(maxsize=1024)
def _evidence(match_length: int, rank: int) -> Evidence:
    return Evidence("context", match_length=match_length, rank=rank)
