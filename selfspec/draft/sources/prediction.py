"""What the answer will probably look like: a text of the caller's, followed with changes allowed.

A cursor knows where in the prediction the text stands. After a token that the prediction did not
foresee, it offers to go on where it was left and right behind that, as after an insertion, a
replacement or a deletion, and wherever else the last tokens stand in the prediction. Serves one
call; knows nothing of what the prompt says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from selfspec.records import Candidate, Evidence, StepRecord

__all__ = ["Prediction", "PredictionCursor", "Whereabouts"]

# So many tokens in a row agree before the text is taken to go on from there.
_SURE = 4
# To meet the prediction again near where it was left says as much as so many tokens of agreement.
_HEAD_START = 2
# A token may lead to where the prediction was left, or to one of the next positions.
_NUM_WAYS_ON = 4
# The occurrences of a token that are looked at, nearest first, and the matches that are kept.
_NUM_AHEAD, _NUM_BEHIND, _MAX_MATCHES = 6, 2, 6
# Runs of agreement count as the same evidence from one of these lengths to the next.
_RUNS = (1, 2, 3, 4, 6, 9, 17)

# The position of the next token in the prediction, and how many tokens before it agree.
Match = tuple[int, int]


class Whereabouts(NamedTuple):
    """Where a text stands in a prediction, drafts included.

    `left` is the position behind the last agreement that was sure, and `num_astray` counts the
    tokens since then.
    """

    matches: tuple[Match, ...]
    left: int
    num_astray: int


class Prediction:
    """The tokens of a prediction and where each of them occurs; rows may share one."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self._behind: dict[int, list[int]] = {}  # The positions right behind each token, in order.
        for position, token in enumerate(self.token_ids, start=1):
            self._behind.setdefault(token, []).append(position)

    def start(self) -> Whereabouts:
        """In front of the first token, which is expected with some trust."""
        return Whereabouts(((0, _HEAD_START),), 0, 0)

    def step(self, stand: Whereabouts, token: int) -> Whereabouts:
        """Where the text stands one token later; costs the same however long the prediction is."""
        ids = self.token_ids
        matches = [(p + 1, n + 1) for p, n in stand.matches if p < len(ids) and ids[p] == token]
        if not matches or matches[0][1] < _SURE:
            matches = self._with_fresh(matches, stand.left, token)
        if matches and matches[0][1] >= _SURE:
            return Whereabouts(tuple(matches), matches[0][0], 0)
        return Whereabouts(tuple(matches), stand.left, stand.num_astray + 1)

    def _with_fresh(self, matches: list[Match], left: int, token: int) -> list[Match]:
        """Adds the nearest other occurrences of a token: longest match first, forward, near."""
        found = dict(self._near(left, token)) | dict(matches)
        ranked = sorted(found.items(), key=lambda m: (-m[1], m[0] <= left, abs(m[0] - left)))
        return ranked[:_MAX_MATCHES]

    def _near(self, left: int, token: int) -> list[Match]:
        behind = self._behind.get(token, [])
        middle = bisect_left(behind, left + 1)
        near = behind[max(middle - _NUM_BEHIND, 0) : middle + _NUM_AHEAD]
        return [(p, 1 + _HEAD_START * (0 < p - left <= _NUM_WAYS_ON)) for p in near]


class PredictionCursor:
    """Where one row's text stands in its prediction."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._stand = prediction.start()

    def root(self) -> Whereabouts:
        """Where the committed text stands."""
        return self._stand

    def expand(self, state: Whereabouts) -> list[Candidate]:
        """What comes next at each match, then at the positions from where the text went astray."""
        ids = self._prediction.token_ids
        named: dict[int, Evidence] = {}
        for position, run in state.matches:
            if position < len(ids) and ids[position] not in named:
                named[ids[position]] = _of_match(run, len(named) + 1)
        if state.num_astray:
            for way, token in enumerate(ids[state.left : state.left + _NUM_WAYS_ON]):
                if token not in named:
                    named[token] = _of_way_on(way, min(state.num_astray, _NUM_WAYS_ON))
        return list(named.items())

    def follow(self, state: Whereabouts, token: int) -> Whereabouts:
        """Any token leads somewhere, as a committed one does."""
        return self._prediction.step(state, token)

    def observe(self, record: StepRecord) -> None:
        """Goes on behind the committed tokens."""
        for token in record.committed_ids:
            self._stand = self._prediction.step(self._stand, token)


@lru_cache(maxsize=1024)
def _of_match(run: int, rank: int) -> Evidence:
    length = max(bound for bound in _RUNS if bound <= run)
    return Evidence("prediction", match_length=length, rank=rank)


@lru_cache(maxsize=64)
def _of_way_on(way: int, num_astray: int) -> Evidence:
    """The way on and for how long the text is astray; a chance of one in six is assumed."""
    return Evidence("prediction", rank=way + 1, count_bin=num_astray, probability_bin=2)
