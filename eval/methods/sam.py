"""The rule of SAM decoding ("SAM Decoding: Speculative Decoding via Suffix Automaton", 2024).

Where the end of the text was said before for long enough, that span alone is drafted, as a
chain; everywhere else a tree from the first-order LUT whose shape is fixed by rank. Nothing is
weighed against anything.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.papers.diaa import Tables
from selfspec.draft.sources import ContextSource, Cursor, LutSource, RowStart, Source
from selfspec.draft.sources.context import ContextCursor
from selfspec.records import Candidate, Evidence, StepRecord, TopK

_LEAST_MATCH = 5


class SamSource(Source):
    """Longest match, else LUT."""

    name = "sam"

    def __init__(self, top_k: int) -> None:
        self._lut: LutSource = Tables(top_k)
        self._context = ContextSource(1)

    def open(self, row: RowStart) -> SamCursor:
        return SamCursor(self._context.open(row), self._lut.open(row))

    def copy(self) -> SamSource:
        """One that knows what this one does."""
        twin = copy.copy(self)
        twin._lut = self._lut.copy()
        return twin

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        self._lut.observe_pairs(pairs, top)


class SamCursor(Cursor):
    """Asks one of two cursors; which one, the root decides for the whole tree."""

    def __init__(self, context: ContextCursor, lut: Cursor) -> None:
        self._context = context
        self._lut = lut
        self._copies = False

    def root(self) -> Any:
        """Chooses by the longest match that the text's end has."""
        state = self._context.root()
        lengths = [run for _, run in state.matches]
        self._copies = max(lengths, default=0) >= _LEAST_MATCH
        return state if self._copies else self._lut.root()

    def expand(self, state: Any) -> list[Candidate]:
        """One token in a chain, the row's tokens in a tree, with no evidence but the rank."""
        if self._copies:
            return [(token, Evidence("match")) for token, _ in self._context.expand(state)[:1]]
        row = enumerate(self._lut.expand(state), start=1)
        return [(token, Evidence("tree", rank=rank)) for rank, (token, _) in row]

    def follow(self, state: Any, token: int) -> Any:
        chosen: Any = self._context if self._copies else self._lut
        return chosen.follow(state, token)

    def observe(self, record: StepRecord) -> None:
        self._context.observe(record)
        self._lut.observe(record)
