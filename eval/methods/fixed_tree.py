"""A LUT tree of 80 nodes whose shape never changes, after Token Recycling, as a source.

A node of the tree is named by ranks: (1, 1, 3) is the third likeliest token behind the likeliest
behind the likeliest. Whatever the tables say, only nodes of the shape are drafted; where a
row is empty, what would hang there is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources import LutSource
from selfspec.draft.sources.lut import LutCursor
from selfspec.records import Candidate, Evidence, StepRecord, TopK

__all__ = ["NUM_DRAFTED", "NUM_RANKS", "FixedTreeSource", "fixed_shape", "rank_rate"]

NUM_DRAFTED = 80  # Token Recycling's
# Our own choice, not the paper's template: chances by rank for which the best 80 nodes have 8
# children of the root and 6 levels, the first rank's descendants deep and many, the last's few.
_RANK_RATES = (0.46, 0.17, 0.09, 0.06, 0.042, 0.032, 0.025, 0.02)
NUM_RANKS = len(_RANK_RATES)

Path = tuple[int, ...]  # ranks, from 1


class _State(NamedTuple):
    """Where a LUT cursor stands, and where in the shape that is."""

    state: Any
    path: Path


class FixedTreeSource:
    """A LUT, asked only for nodes of the shape."""

    name = "lut"

    def __init__(self, lut: LutSource) -> None:
        self._lut = lut

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> FixedTreeCursor:
        """A cursor behind the prompt."""
        return FixedTreeCursor(self._lut.open(prompt_ids, learns=learns))

    def copy(self) -> FixedTreeSource:
        """With a copy of the LUT."""
        return FixedTreeSource(self._lut.copy())

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """What the LUT learns."""
        self._lut.observe_pairs(pairs, top)


class FixedTreeCursor:
    """A LUT's cursor that keeps to the shape."""

    def __init__(self, lut: LutCursor) -> None:
        self._lut = lut
        self._rows: dict[Path, list[Candidate]] = {}  # that were asked for, by path in the shape

    def root(self) -> _State:
        """The shape's root."""
        self._rows.clear()
        return _State(self._lut.root(), ())

    def expand(self, state: _State) -> list[Candidate]:
        """The row's entries that are in the shape."""
        row = self._rows[state.path] = self._lut.expand(state.state)
        return [
            entry for rank, entry in enumerate(row, start=1) if (*state.path, rank) in fixed_shape()
        ]

    def follow(self, state: _State, token: int) -> _State:
        """Below one of the row's entries: nobody else names a token."""
        ranks = {named: rank for rank, (named, _) in enumerate(self._rows[state.path], start=1)}
        return _State(self._lut.follow(state.state, token), (*state.path, ranks[token]))

    def observe(self, record: StepRecord) -> None:
        """The LUT learns."""
        self._lut.observe(record)


def rank_rate(evidence: Evidence) -> float:
    """The chance that the shape gives to a rank, whatever was recorded there."""
    return _RANK_RATES[min(evidence.rank, NUM_RANKS) - 1]


@cache
def fixed_shape() -> frozenset[Path]:
    """The 80 best paths by the products of their ranks' chances."""
    waiting: list[tuple[float, Path]] = [
        (-rate, (rank,)) for rank, rate in enumerate(_RANK_RATES, start=1)
    ]
    heapq.heapify(waiting)
    shape: set[Path] = set()
    while len(shape) < NUM_DRAFTED:
        negative, path = heapq.heappop(waiting)
        shape.add(path)
        for rank, rate in enumerate(_RANK_RATES, start=1):
            heapq.heappush(waiting, (negative * rate, (*path, rank)))
    return frozenset(shape)
