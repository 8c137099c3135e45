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
from operator import itemgetter
from typing import NamedTuple, Protocol

from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import Candidate, Evidence, StepRecord

# When 4 tokens in a row agree, the text goes on from there. A token to which a way on leads counts
# as much.
SURE = 4
# After this many tokens without such an agreement, ways on are looked at no more.
_MOST_ASTRAY = 16
# Runs of agreement between two of these lengths are the same evidence.
_RUNS = (1, 2, 3, 4, 6, 10, 16, 24, 40, 64)

# The place of the next token in the stored text, and how many tokens before it agree.
Match = tuple[int, int]
_run = itemgetter(1)


class StoredText(Protocol):
    """A text, or many, each token at a place. All of this runs for each node of each tree."""

    def next_tokens(self, matches: Iterable[Match]) -> list[tuple[int, int]]:
        """The token at each match and the match's length, where there is one."""
        ...

    def longer(self, matches: Iterable[Match], token: int) -> list[Match]:
        """The matches that one more token continues, one token later."""
        ...

    def after(self, place: int) -> int:
        """The place of the token after the one at a place; -1 if there is none yet."""
        ...

    def near(self, token: int, left: int) -> Iterable[int]:
        """Places right after a token, the likeliest first; the text was left at one, or at -1."""
        ...


class Following(NamedTuple):
    """Where a text is in a stored one, drafts included."""

    matches: tuple[Match, ...] = ()  # The longest first.
    left: int = -1  # The place after the last agreement that was sure; -1: there is none.
    ahead: int = -1  # The place as many tokens later as came since.
    num_astray: int = 0  # The tokens since then.

    @property
    def is_nowhere(self) -> bool:
        """Is there no match, and no way on?"""
        return not self.matches and (self.left < 0 or self.num_astray > _MOST_ASTRAY)


class FollowingCursor(Cursor):
    """The places of one row's text in a stored one, the longest `most_matches`.

    Names at most `top_k` tokens: those at the matches, and then those at the three ways on. After
    `sure` tokens that agree, the text goes on from there. From `longest` on, runs are the same
    evidence.
    """

    def __init__(
        self,
        name: str,
        text: StoredText,
        end: Following,
        *,
        most_matches: int = 4,
        top_k: int = 7,
        sure: int = SURE,
        longest: int = _RUNS[-1],
    ) -> None:
        self._name, self._text, self._end = name, text, end
        self._most_matches, self._top_k = most_matches, top_k
        self._sure, self._longest = sure, longest

    def root(self) -> Following:
        return self._end

    def expand(self, state: Following) -> list[Candidate]:
        """What comes next at each match, the longest and then most frequent first; then ways on."""
        name, text = self._name, self._text
        following = text.next_tokens(state.matches)
        runs = dict(reversed(following))  # Of each token, the longest match.
        ranked = list(runs)
        if len(ranked) > 1:
            tokens = [token for token, _ in following]
            ranked.sort(key=lambda token: (-runs[token], -tokens.count(token), tokens.index(token)))
        named = [
            (token, _of_match(name, min(runs[token], self._longest), rank))
            for rank, token in enumerate(ranked, start=1)
        ]
        if state.num_astray and (ways_on := self._ways_on(state)):
            ways = [(place, way) for way, place in enumerate(ways_on)]
            num_astray, known = min(state.num_astray, 3), set(ranked)
            for token, way in text.next_tokens(ways):
                if token not in known:
                    known.add(token)
                    named.append((token, _of_way_on(name, way, num_astray)))
        return named[: self._top_k]

    def follow(self, state: Following, token: int) -> Following:
        """The places one token later."""
        return self._followed(state, token, looks_around=True)

    def _followed(self, state: Following, token: int, *, looks_around: bool) -> Following:
        """The same; looks for other places of the token if it should, or if no match goes on."""
        text, sure = self._text, self._sure
        matches = text.longer(state.matches, token)
        ways_on = [(place, SURE - 1) for place in self._ways_on(state)]
        if ways_on and (ways := text.longer(ways_on, token)):
            matches = sorted({**dict(ways), **dict(matches)}.items(), key=_run, reverse=True)
        if not matches or (looks_around and len(matches) < self._most_matches):
            known = dict(matches)
            matches += [(place, 1) for place in text.near(token, state.left) if place not in known]
        kept = tuple(matches[: self._most_matches])
        if kept and kept[0][1] >= sure:
            return Following(kept, kept[0][0], kept[0][0])
        ahead = text.after(state.ahead) if state.left >= 0 else -1
        return Following(kept, state.left, ahead, state.num_astray + 1)

    def _ways_on(self, state: Following) -> tuple[int, ...]:
        """The tokens since it was left were inserted, or replace as many, or one."""
        if state.left < 0 or state.num_astray > _MOST_ASTRAY:
            return ()
        return state.left, state.ahead, self._text.after(state.left)

    def observe(self, record: StepRecord) -> None:
        for token in record.committed_ids:
            self._end = self.follow(self._end, token)


class IndexedText:
    """A text that may grow, and the positions right after each of its tokens.

    Near are the newest ones. If `num_newest` is 0, they are those around the place where the text
    was left: 4 ahead of it and 2 behind.
    """

    def __init__(self, token_ids: Iterable[int], num_newest: int = 0) -> None:
        self._token_ids: list[int] = []
        self._after: dict[int, list[int]] = {}
        self._num_newest = num_newest
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        self._token_ids.append(token)
        self._after.setdefault(token, []).append(len(self._token_ids))

    def next_tokens(self, matches: Iterable[Match]) -> list[tuple[int, int]]:
        ids, end = self._token_ids, len(self._token_ids)
        return [(ids[place], run) for place, run in matches if place < end]

    def longer(self, matches: Iterable[Match], token: int) -> list[Match]:
        ids, end = self._token_ids, len(self._token_ids)
        return [(p + 1, run + 1) for p, run in matches if p < end and ids[p] == token]

    def after(self, place: int) -> int:
        return place + 1

    def near(self, token: int, left: int) -> Iterable[int]:
        places = self._after.get(token, [])
        if self._num_newest:
            return reversed(places[-self._num_newest :])
        middle = bisect_left(places, left + 1)
        return (*places[middle : middle + 4], *reversed(places[max(middle - 2, 0) : middle]))


class Prediction(Source):
    """What the answer will probably look like: a text of the caller's, for one call.

    Its rows may share one.
    """

    name = "prediction"

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.text = IndexedText(token_ids)

    def open(self, row: RowStart) -> FollowingCursor:
        """A cursor in front of the answer's first token, which is expected with some trust."""
        front = Following(((0, SURE - 1),), left=0, ahead=0)
        return FollowingCursor(self.name, self.text, front)


@lru_cache(maxsize=1024)
def _of_match(name: str, run: int, rank: int) -> Evidence:
    length = max(shortest for shortest in _RUNS if shortest <= run)
    return Evidence(name, match_length=length, rank=rank)


@lru_cache(maxsize=64)
def _of_way_on(name: str, way: int, num_astray: int) -> Evidence:
    """Evidence for a way on after the texts have parted; it begins with a chance of one in six."""
    return Evidence(name, rank=way + 1, count_bin=num_astray, probability_bin=2)
