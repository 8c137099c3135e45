"""What this request has said already, or was about to: suffix matches, and branches' n-grams.

Keeps, for the end of the text, every earlier place of prompt and output that reads the same
backwards and for how many tokens. Beside it stand the n-grams that branches last yielded behind
each token. Its memory is one request's: nothing reaches another row or call.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.grams import GramQueues, Tail
from selfspec.records import Candidate, Evidence, StepRecord, TopK

__all__ = ["ContextCursor", "ContextSource", "Found", "Place"]

_MAX_MATCHES = 32  # places remembered for one suffix, the freshest
_MAX_MATCH_LENGTH = 4  # lengths beyond are told apart no more
_LONGEST_SEARCHED = 64  # a prompt that repeats itself throughout would be compared for ever

Match = tuple[int, int]  # (position of the next token, length of the match before it)
GramMatch = tuple[int, Tail]  # (tokens of an n-gram that are behind us, those still to come)


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

    def observe_places(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Ignored: the prompt's tokens came with `open`."""


class Found(NamedTuple):
    """What the context knows about one place."""

    matches: Sequence[Match]
    grams: Sequence[GramMatch]


class Place:
    """Where a draft stands: behind a token, below another place.

    What is known there is found out when it is asked for: most candidates never win a node.
    """

    __slots__ = ("above", "found", "token")

    def __init__(
        self, token: int, *, above: Found | None = None, found: Found | None = None
    ) -> None:
        self.token = token
        self.above = above
        self.found = found


class ContextCursor:
    """A row's text with the places that match its end, and its n-grams."""

    def __init__(self, prompt_ids: Sequence[int], top_k: int) -> None:
        self.token_ids = list(prompt_ids)
        self._top_k = top_k
        self._after: dict[int, list[int]] = {}  # token -> positions right behind it
        for position, token in enumerate(self.token_ids, start=1):
            self._after.setdefault(token, []).append(position)
        self._matches = self._searched() if self.token_ids else []
        self.grams = GramQueues()

    def root(self) -> Place:
        """Where the text read as it ends now, and the n-grams of its last token."""
        last = self.token_ids[-1] if self.token_ids else -1
        return Place(last, found=Found(self._matches, self._fresh_grams(last)))

    def expand(self, state: Place) -> list[Candidate]:
        """The tokens found there: longest match first, then freshest; then the n-grams' own."""
        found = self.find(state)
        candidates = self._copied(found.matches)
        if found.grams:
            candidates += self._from_grams(found.grams, {token for token, _ in candidates})
        return candidates

    def follow(self, state: Place, token: int) -> Place:
        """Any token may have been said before."""
        return Place(token, above=self.find(state))

    def observe(self, record: StepRecord) -> None:
        """Appends the committed tokens, and takes the branches' n-grams in."""
        for token in record.committed_ids:
            self._append(token)
        for gram in record.grams:
            self.grams.add(gram)

    def find(self, place: Place) -> Found:
        """What is known at a place, looked up once; costs a look at each match above it."""
        if place.found is None:
            assert place.above is not None
            place.found = self._behind(place.above, place.token)
        return place.found

    def _copied(self, matches: Sequence[Match]) -> list[Candidate]:
        """What the text said at each match, the tokens with the longest one first."""
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

    def _from_grams(self, grams: Sequence[GramMatch], copied: set[int]) -> list[Candidate]:
        """The next tokens of n-grams that the text itself does not name here."""
        lengths: dict[int, int] = {}
        for length, tail in grams:
            # what the text said itself tells more than one token of an n-gram does
            if tail[0] not in copied and (length > 1 or not copied):
                lengths[tail[0]] = max(length, lengths.get(tail[0], 0))
        return [
            (token, Evidence("grams", match_length=length))
            for token, length in itertools.islice(lengths.items(), self._top_k)
        ]

    def _behind(self, above: Found, token: int) -> Found:
        text = self.token_ids
        matches = [(p + 1, n + 1) for p, n in above.matches if p < len(text) and text[p] == token]
        if not matches:
            fresh = self._after.get(token, ())[-_MAX_MATCHES:]
            matches = [(p, 1) for p in reversed(fresh)]
        longer = [(n + 1, tail[1:]) for n, tail in above.grams if tail[0] == token and tail[1:]]
        return Found(matches, longer + self._fresh_grams(token))

    def _fresh_grams(self, token: int) -> list[GramMatch]:
        return [(1, tail) for tail in self.grams.behind(token)]

    def _searched(self) -> list[Match]:
        """The matches of the end, from nothing; costs some looks at each place of its token."""
        text, found = self.token_ids, []
        for position in self._after[text[-1]][:-1]:  # the last one is the end itself
            length, longest = 1, min(position, _LONGEST_SEARCHED)
            while length < longest and text[position - 1 - length] == text[-1 - length]:
                length += 1
            found.append((position, length))
        return _freshest_first(found)

    def _append(self, token: int) -> None:
        """Moves the end by one token; costs at most two looks at each remembered match."""
        longer = {p + 1: n + 1 for p, n in self._matches if self.token_ids[p] == token}
        behind = self._after.setdefault(token, [])
        fresh = {p: longer.get(p, 1) for p in behind[-_MAX_MATCHES:]}
        fresh.update(longer)  # an old but long match stays, however often the token came since
        self._matches = _freshest_first(list(fresh.items()))
        self.token_ids.append(token)
        behind.append(len(self.token_ids))


def _freshest_first(matches: list[Match]) -> list[Match]:
    """As many as are remembered, the longest of all."""
    if len(matches) > _MAX_MATCHES:
        matches = heapq.nlargest(_MAX_MATCHES, matches, key=lambda match: match[::-1])
    return sorted(matches, reverse=True)


@lru_cache(maxsize=1024)
def _evidence(match_length: int, rank: int) -> Evidence:
    return Evidence("context", match_length=match_length, rank=rank)
