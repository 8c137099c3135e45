"""What the text of this request contains already: suffix matches.

Keeps every earlier position of prompt and output where the text before reads as it does at the end,
and for how many tokens. All of this belongs to one request: nothing reaches another row or call.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import Candidate, Evidence, StepRecord

__all__ = ["ContextCursor", "ContextSource", "TextEnd"]

# The freshest positions are remembered for each suffix, at most this many.
_MAX_MATCHES = 32
# All longer matches count as the same evidence.
_MAX_MATCH_LENGTH = 4
# A prompt that repeats itself throughout would be compared without end.
_LONGEST_SEARCHED = 64

# The position of the next token, and the length of the match before it.
Match = tuple[int, int]


class ContextSource(Source):
    """Opens a fresh memory for each row; keeps nothing itself."""

    name = "context"

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def open(self, row: RowStart) -> ContextCursor:
        """A cursor after the prompt, which is read once."""
        return ContextCursor(row.prompt_ids, self._top_k)


class TextEnd:
    """The end of the text with drafts after it: a token, below another such end.

    Its matches are looked up when they are asked for: most candidates never win a node.
    """

    __slots__ = ("above", "matches", "token")

    def __init__(
        self,
        token: int,
        *,
        above: Sequence[Match] = (),
        matches: Sequence[Match] | None = None,
    ) -> None:
        self.token = token
        self.above = above
        self.matches = matches


class ContextCursor(Cursor):
    """A row's text with the positions that match its end."""

    def __init__(self, prompt_ids: Sequence[int], top_k: int) -> None:
        self.token_ids = list(prompt_ids)
        self._top_k = top_k
        self._after: dict[int, list[int]] = {}  # The positions right after each token.
        for position, token in enumerate(self.token_ids, start=1):
            self._after.setdefault(token, []).append(position)
        self._matches = self._searched() if self.token_ids else []

    def root(self) -> TextEnd:
        """The end of the committed text."""
        last = self.token_ids[-1] if self.token_ids else -1
        return TextEnd(last, matches=self._matches)

    def expand(self, state: TextEnd) -> list[Candidate]:
        """The tokens found there: longest match first, then freshest."""
        return self._copied(self.find(state))

    def follow(self, state: TextEnd, token: int) -> TextEnd:
        """Any token may have come before."""
        return TextEnd(token, above=self.find(state))

    def observe(self, record: StepRecord) -> None:
        """Appends the committed tokens."""
        for token in record.committed_ids:
            self._append(token)

    def find(self, end: TextEnd) -> Sequence[Match]:
        """The matches of an end, looked up once; costs a look at each match above it."""
        if end.matches is None:
            end.matches = self._extended(end.above, end.token)
        return end.matches

    def _copied(self, matches: Sequence[Match]) -> list[Candidate]:
        """The token after each match, those with the longest match first."""
        if not matches:
            return []
        text, end = self.token_ids, len(self.token_ids)
        longest: dict[int, int] = {}
        counts: dict[int, int] = {}
        for position, length in matches:
            if position < end:
                token = text[position]
                if token not in longest:
                    longest[token], counts[token] = length, 1
                    continue
                counts[token] += 1
                if length > longest[token]:
                    longest[token] = length
        ranked = list(longest)
        if len(ranked) > 1:
            ranked.sort(key=lambda token: (-longest[token], -counts[token]))
        return [
            (token, _evidence(min(longest[token], _MAX_MATCH_LENGTH), rank))
            for rank, token in enumerate(ranked[: self._top_k], start=1)
        ]

    def _extended(self, above: Sequence[Match], token: int) -> Sequence[Match]:
        text = self.token_ids
        matches = [(p + 1, n + 1) for p, n in above if p < len(text) and text[p] == token]
        if not matches:
            fresh = self._after.get(token, ())[-_MAX_MATCHES:]
            matches = [(p, 1) for p in reversed(fresh)]
        return matches

    def _searched(self) -> list[Match]:
        """The matches of the end, from nothing; costs some looks at each position of its token."""
        text, found = self.token_ids, []
        for position in self._after[text[-1]][:-1]:  # The last one is the end itself.
            length, longest = 1, min(position, _LONGEST_SEARCHED)
            while length < longest and text[position - 1 - length] == text[-1 - length]:
                length += 1
            found.append((position, length))
        return _freshest_first(found)

    def _append(self, token: int) -> None:
        """Moves the end by one token; costs at most two looks at each remembered match."""
        longer = {p + 1: n + 1 for p, n in self._matches if self.token_ids[p] == token}
        positions = self._after.setdefault(token, [])
        fresh = {p: longer.get(p, 1) for p in positions[-_MAX_MATCHES:]}
        fresh.update(longer)  # An old but long match stays, however often the token came since.
        self._matches = _freshest_first(list(fresh.items()))
        self.token_ids.append(token)
        positions.append(len(self.token_ids))


def _freshest_first(matches: list[Match]) -> list[Match]:
    """As many as are remembered, the longest of all."""
    if len(matches) > _MAX_MATCHES:
        matches = heapq.nlargest(_MAX_MATCHES, matches, key=lambda match: match[::-1])
    return sorted(matches, reverse=True)


@lru_cache(maxsize=1024)
def _evidence(match_length: int, rank: int) -> Evidence:
    return Evidence("context", match_length=match_length, rank=rank)
