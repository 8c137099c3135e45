"""What the answer will probably look like: a text of the caller's, followed with changes allowed.

A cursor knows the place of the text in the prediction. After n tokens that the prediction does not
have there, it offers to continue where the prediction was left, n tokens later, or one token later:
they were inserted, or they replace n tokens or one. It also continues wherever else the last tokens
occur in the prediction, as after a deletion. Serves one call; knows nothing of the prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from selfspec.draft.sources.matches import IndexedText, Match
from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import Candidate, Evidence, StepRecord

# When 4 tokens in a row agree, the text goes on from there. A token to which a way on leads counts
# as much.
_SURE = 4
# Of a token, 4 occurrences ahead and 2 behind are looked at. The best 4 matches are kept.
_NUM_AHEAD, _NUM_BEHIND, _MAX_MATCHES = 4, 2, 4
# Runs of agreement between two of these lengths are the same evidence.
_RUNS = (1, 2, 3, 4, 6, 9, 17)


class PredictionState(NamedTuple):
    """The place of a text in a prediction, drafts included.

    `left` is the position after the last agreement that was sure, and `num_astray` the number of
    tokens since then.
    """

    matches: tuple[Match, ...]
    left: int
    num_astray: int

    @property
    def ways_on(self) -> tuple[int, int, int]:
        """Where it may go on: the tokens since then were inserted, or replace as many, or one."""
        return self.left, self.left + self.num_astray, self.left + 1


class Prediction(Source):
    """The tokens of a prediction and where each of them occurs; rows may share one."""

    name = "prediction"

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.places = IndexedText(token_ids)

    def open(self, row: RowStart) -> PredictionCursor:
        """A cursor in front of the answer's first token, wherever the prompt ends."""
        return PredictionCursor(self.places)


class PredictionCursor(Cursor):
    """The place of one row's text in its prediction."""

    def __init__(self, places: IndexedText) -> None:
        self._places = places
        # In front of the first token, which is expected with some trust.
        self._end = PredictionState(((0, _SURE - 1),), left=0, num_astray=0)

    def root(self) -> PredictionState:
        return self._end

    def expand(self, state: PredictionState) -> list[Candidate]:
        """What comes next at each match, then at the ways on."""
        named: dict[int, Evidence] = {}
        for token, run in self._places.next_tokens(state.matches):
            named.setdefault(token, _of_match(run, len(named) + 1))
        if state.num_astray:
            ways_on = [(position, way) for way, position in enumerate(state.ways_on)]
            for token, way in self._places.next_tokens(ways_on):
                named.setdefault(token, _of_way_on(way, min(state.num_astray, 3)))
        return list(named.items())

    def follow(self, state: PredictionState, token: int) -> PredictionState:
        """The place one token later; O(log n) in the length of the prediction."""
        matches = self._places.longer(state.matches, token)
        if not matches or matches[0][1] < _SURE:
            # Other occurrences too: longest match first, then forward, then nearest.
            left, others = state.left, dict(self._near(state, token)) | dict(matches)
            matches = sorted(others.items(), key=lambda m: (-m[1], m[0] <= left, abs(m[0] - left)))
        if matches and matches[0][1] >= _SURE:
            return PredictionState(tuple(matches[:_MAX_MATCHES]), matches[0][0], 0)
        return PredictionState(tuple(matches[:_MAX_MATCHES]), state.left, state.num_astray + 1)

    def observe(self, record: StepRecord) -> None:
        for token in record.committed_ids:
            self._end = self.follow(self._end, token)

    def _near(self, state: PredictionState, token: int) -> list[Match]:
        """Where else the prediction has a token; a way on that leads there is sure."""
        after, left = self._places.after(token), state.left
        middle = bisect_left(after, left + 1)
        near = after[max(middle - _NUM_BEHIND, 0) : middle + _NUM_AHEAD]
        return [(p, _SURE if p - 1 in state.ways_on else 1) for p in near]


@lru_cache(maxsize=64)
def _of_match(run: int, rank: int) -> Evidence:
    length = max(shortest for shortest in _RUNS if shortest <= run)
    return Evidence("prediction", match_length=length, rank=rank)


@lru_cache(maxsize=64)
def _of_way_on(way: int, num_astray: int) -> Evidence:
    """Which way on, and for how long the text is astray; a chance of one in six is assumed."""
    return Evidence("prediction", rank=way + 1, count_bin=num_astray, probability_bin=2)
