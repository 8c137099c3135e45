"""What this request has said already: suffix matches over prompt and output.

Keeps, for the end of the text, every earlier place that reads the same backwards and for how
many tokens. Its memory is one request's: nothing reaches another row or call.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from selfspec.records import Candidate, Evidence, StepRecord, TopK

__all__ = ["ContextCursor", "ContextSource"]

_MAX_MATCHES = 32  # places remembered for one suffix, the freshest
_MAX_MATCH_LENGTH = 8  # lengths beyond are told apart no more
_MAX_PLACES = 3

Match = tuple[int, int]  # (position of the next token, length of the match before it)


class ContextSource:
    """Opens a fresh memory for each row; keeps nothing itself."""

    name = "context"

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> ContextCursor:
        """A cursor behind the prompt, which is read once."""
        return ContextCursor(prompt_ids, self._top_k)

    def copy(self) -> ContextSource:
        """Itself: there is nothing to keep apart."""
        return self

    def observe_prompt(self, token_ids: Sequence[int], top: TopK) -> None:
        """Ignored: the prompt's tokens came with `open`."""


class ContextCursor:
    """A row's text with the places that match its end."""

    def __init__(self, prompt_ids: Sequence[int], top_k: int) -> None:
        self.token_ids: list[int] = []
        self._top_k = top_k
        self._after: dict[int, list[int]] = {}  # token -> positions right behind it
        self._matches: tuple[Match, ...] = ()
        for token in prompt_ids:
            self._append(token)

    def root(self) -> tuple[Match, ...]:
        """All earlier places whose text matches the end of this one, the freshest first."""
        return self._matches

    def expand(self, state: tuple[Match, ...]) -> list[Candidate]:
        """The tokens found at those places: longest match first, then freshest."""
        groups = self._group_by_token(state)
        ranked = sorted(groups.items(), key=_longest)[: self._top_k]
        return [
            Candidate(token, _evidence(places, rank), tuple((p + 1, n + 1) for p, n in places))
            for rank, (token, places) in enumerate(ranked, start=1)
        ]

    def follow(self, state: tuple[Match, ...], token: int) -> None:
        """Nothing: a token that came behind no match is no match's continuation."""

    def observe(self, record: StepRecord) -> None:
        """Appends the committed tokens."""
        for token in record.committed_ids:
            self._append(token)

    def _group_by_token(self, state: tuple[Match, ...]) -> dict[int, list[Match]]:
        groups: dict[int, list[Match]] = {}
        for place in state:
            if place[0] < len(self.token_ids):
                groups.setdefault(self.token_ids[place[0]], []).append(place)
        return groups

    def _append(self, token: int) -> None:
        """Moves the end by one token; costs at most two looks at each remembered match."""
        longer = {p + 1: n + 1 for p, n in self._matches if self.token_ids[p] == token}
        behind = self._after.setdefault(token, [])
        fresh = {p: longer.get(p, 1) for p in behind[-_MAX_MATCHES:]}
        fresh.update(longer)  # an old but long match stays, however often the token came since
        kept = heapq.nlargest(_MAX_MATCHES, fresh.items(), key=lambda match: match[::-1])
        self._matches = tuple(sorted(kept, reverse=True))
        self.token_ids.append(token)
        behind.append(len(self.token_ids))


def _longest(group: tuple[int, list[Match]]) -> tuple[int, int]:
    places = group[1]
    return (-max(n for _, n in places), -len(places))


def _evidence(places: list[Match], rank: int) -> Evidence:
    length = max(n for _, n in places)
    return _evidence_of(min(length, _MAX_MATCH_LENGTH), rank, min(len(places), _MAX_PLACES))


@lru_cache(maxsize=1024)
def _evidence_of(match_length: int, rank: int, num_places: int) -> Evidence:
    return Evidence("context", match_length=match_length, rank=rank, num_places=num_places)
