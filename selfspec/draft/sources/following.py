"""Where a text goes on as another one does, or as it did before itself, with changes allowed.

A cursor knows the places of a stored text where the tokens before agree with the end of its row's
text. After n tokens that the stored text does not have there, it offers to go on where that was
left, n tokens later, or one token later: they were inserted, or they replace n tokens or one. It
also goes on wherever else the last tokens are stored, as after a deletion.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from selfspec.draft.sources.source import Cursor
from selfspec.records import Candidate, Evidence, StepRecord

# When 4 tokens in a row agree, the text goes on from there. A token to which a way on leads counts
# as much.
SURE = 4
# After this many tokens without such an agreement, ways on are offered no more.
_MOST_ASTRAY = 32
# Runs of agreement between two of these lengths are the same evidence.
_RUNS = (1, 2, 3, 4, 6, 10, 16, 24, 40, 64)

# Of a token, 4 occurrences ahead and 2 behind are looked at.
_NUM_AHEAD, _NUM_BEHIND = 4, 2

# The place of the next token in the stored text, and how many tokens before it agree.
Match = tuple[int, int]


class StoredText(Protocol):
    """A text, or many, each token at a place."""

    def token(self, place: int) -> int:
        """The token at a place; -1 where there is none yet, or no more."""
        ...

    def after(self, place: int) -> int:
        """The place of the token after the one at a place; -1 if there is none yet."""
        ...

    def near(self, token: int, left: int) -> Iterable[int]:
        """Places right after a token, the likeliest first; the text was left at one."""
        ...


class Following(NamedTuple):
    """Where a text is in a stored one, drafts included."""

    matches: tuple[Match, ...] = ()  # The longest first.
    left: int = -1  # The place after the last agreement that was sure.
    ahead: int = -1  # The place as many tokens later as came since.
    num_astray: int = 0  # The tokens since then.


class FollowingCursor(Cursor):
    """The places of one row's text in a stored one. Names at most `top_k` tokens."""

    def __init__(
        self,
        text: StoredText,
        name: str,
        top_k: int,
        most_matches: int,
        start: Following = Following(),  # noqa: B008 has no state
    ) -> None:
        self._text = text
        self._name = name
        self._top_k = top_k
        self._most_matches = most_matches
        self._end = start

    def root(self) -> Following:
        return self._end

    def expand(self, state: Following) -> list[Candidate]:
        """What comes next at each match, the longest and then most frequent first; then ways on."""
        text, longest, counts = self._text, dict[int, int](), dict[int, int]()
        for place, run in state.matches:
            if (token := text.token(place)) >= 0:
                longest.setdefault(token, run)
                counts[token] = counts.get(token, 0) + 1
        ranked = sorted(longest, key=lambda token: (-longest[token], -counts[token]))
        named = {
            token: _of_match(self._name, longest[token], rank)
            for rank, token in enumerate(ranked[: self._top_k], start=1)
        }
        if 0 < state.num_astray <= _MOST_ASTRAY:
            for way, place in enumerate(self._ways_on(state)):
                if (token := text.token(place)) >= 0:
                    named.setdefault(token, _of_way_on(self._name, way, min(state.num_astray, 3)))
        return list(named.items())

    def follow(self, state: Following, token: int) -> Following:
        """The places one token later."""
        text = self._text
        matches = [(text.after(p), run + 1) for p, run in state.matches if text.token(p) == token]
        if not matches or matches[0][1] < SURE:
            ways = {text.after(p): SURE for p in self._ways_on(state) if text.token(p) == token}
            others = dict.fromkeys(text.near(token, state.left), 1)
            matches = list((others | ways | dict(matches)).items())
            matches.sort(key=lambda match: -match[1])
        return self._moved(state, matches)

    def _moved(self, state: Following, matches: Sequence[Match]) -> Following:
        kept = tuple(matches[: self._most_matches])
        if kept and kept[0][1] >= SURE:
            return Following(kept, kept[0][0], kept[0][0])
        ahead = -1 if state.ahead < 0 else self._text.after(state.ahead)
        return Following(kept, state.left, ahead, state.num_astray + 1)

    def _ways_on(self, state: Following) -> tuple[int, ...]:
        """The tokens since then were inserted, or replace as many, or one."""
        if state.left < 0 or self._text.token(state.left) < 0:
            return ()
        return state.left, state.ahead, self._text.after(state.left)

    def observe(self, record: StepRecord) -> None:
        for token in record.committed_ids:
            self._end = self.follow(self._end, token)


class IndexedText:
    """A text that may grow, and the positions right after each of its tokens."""

    def __init__(self, token_ids: Iterable[int], num_newest: int = 0) -> None:
        self._num_newest = num_newest
        self.token_ids: list[int] = []
        self._after: dict[int, list[int]] = {}
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self._after.setdefault(token, []).append(len(self.token_ids))

    def token(self, place: int) -> int:
        return self.token_ids[place] if 0 <= place < len(self.token_ids) else -1

    def after(self, place: int) -> int:
        return place + 1

    def near(self, token: int, left: int) -> Iterable[int]:
        after = self._after.get(token, [])
        if self._num_newest:
            return reversed(after[-self._num_newest :])
        middle = bisect_left(after, left + 1)
        return (
            *after[middle : middle + _NUM_AHEAD],
            *after[max(middle - _NUM_BEHIND, 0) : middle][::-1],
        )


@lru_cache(maxsize=1024)
def _of_match(name: str, run: int, rank: int) -> Evidence:
    length = max(shortest for shortest in _RUNS if shortest <= run)
    return Evidence(name, match_length=length, rank=rank)


@lru_cache(maxsize=64)
def _of_way_on(name: str, way: int, num_astray: int) -> Evidence:
    """Which way on, and for how long the text is astray; a chance of one in six is assumed."""
    return Evidence(name, rank=way + 1, count_bin=num_astray, probability_bin=2)
