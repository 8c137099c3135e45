"""What a reader of the model's hidden states names at the end of the text: a chain of tokens.

Knows tokens and chances; the states are hidden by `StateReader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

from selfspec.draft.sources.source import Cursor, Source
from selfspec.draft.sources.worth import SourceWorth
from selfspec.records import (
    Candidate,
    Evidence,
    Likely,
    StepRecord,
    TimeBudget,
    halvings,
    sources_of,
)

# The bins of chances begin at 0.97, 0.9, 0.75, 0.5, and then at each half of the one before.
_SURE = (0.75, 0.9, 0.97)


class StateReader(Protocol):
    """What reads a text's hidden states."""

    def begin(self) -> None:
        """Learns the prompt."""
        ...

    def learn(self, ids: Sequence[int], path: Sequence[int], states: Any) -> None:
        """Takes in the nodes of a tree at the end of the text, which goes on along the path."""
        ...

    def skip(self, ids: Sequence[int]) -> None:
        """The text went on by these tokens, and nobody knows the states."""
        ...

    def chain(self, token: int, num: int) -> list[Likely]:
        """The likeliest tokens after the last one, `token`, and after the best of these."""
        ...


class StateSource(Source):
    """A source of the model's own, for at most `most_rows` rows; `worth` says whether it pays.

    `is_wanted` says whether the readers of all rows are asked in the next step, and `observe` takes
    in a step in which one was.
    """

    def __init__(self, worth: SourceWorth, most_rows: int) -> None:
        self.is_wanted = True
        self.observe = worth.observe
        self._worth = worth
        self._most_rows = most_rows

    def before_step(self, num_rows: int, budget: TimeBudget) -> None:
        may_ask = num_rows <= self._most_rows
        self.is_wanted = may_ask and self._worth.should_ask(budget)


class StateCursor(Cursor):
    """The end of one row's text, as its reader sees it; a state is how far down the chain it is.

    Whether it is asked is decided for all rows alike, before each step.
    """

    def __init__(
        self, reader: StateReader, top_k: int, source: StateSource, budget: TimeBudget
    ) -> None:
        self._reader = reader
        self._top_k = top_k
        self._source = source
        self._budget = budget
        self._has_begun = False
        self._token: int | None = None
        self._chain: list[Likely] = []  # What was named in this step.
        self._seconds: float | None = None  # Those of this step; None if it was not asked.

    @property
    def wants_states(self) -> bool:  # type: ignore[override]
        """Only while it is asked, since the hook at the output head takes time."""
        return self._source.is_wanted

    def prepare(self) -> None:
        if self._source.is_wanted and not self._has_begun and self._budget.affords(None):
            start = perf_counter()
            self._reader.begin()
            self._has_begun = True
            self._budget.charge(perf_counter() - start)

    def root(self) -> int | None:
        can_ask = self._source.is_wanted and self._has_begun and self._token is not None
        return 0 if can_ask else None

    def expand(self, state: int | None) -> list[Candidate]:
        """What the reader names there. It is asked at the root."""
        if state is None:
            return []
        if state == 0:
            assert self._token is not None
            start = perf_counter()
            self._chain = self._reader.chain(self._token, self._top_k)
            self._seconds = perf_counter() - start
        likely = self._chain[state] if state < len(self._chain) else []
        return [(token, _evidence(self._source.name, state, chance)) for token, chance in likely]

    def follow(self, state: int | None, token: int) -> int | None:
        """A reader goes on after the token that it finds likeliest."""
        if state is None or state + 1 >= len(self._chain) or token != self._chain[state][0][0]:
            return None
        return state + 1

    def observe(self, record: StepRecord) -> None:
        tree = record.tree
        if record.states is not None:
            self._reader.learn(tree.tokens, record.path, record.states)
        elif self._token is not None:  # The first step is the prompt's.
            self._reader.skip(record.committed_ids)
        if self._seconds is not None:
            self._source.observe(seconds=self._seconds, tokens=self._brought(record))
            self._seconds = None
        self._chain = []
        if record.committed_ids:
            self._token = record.committed_ids[-1]

    def _brought(self, record: StepRecord) -> int:
        """The accepted tokens that nobody would have drafted without it."""
        accepted = record.accepted_nodes()
        for index, node in enumerate(accepted):
            if set(sources_of(record.tree.evidence[node])) == {self._source.name}:
                return len(accepted) - index
        return 0


def bins(chance: float) -> tuple[int, int]:
    """How many times a probability is halved, and how many of the sure bounds it reaches.

    >>> bins(0.95), bins(0.5), bins(0.2)
    ((0, 2), (1, 0), (2, 0))
    """
    return halvings(chance), sum(chance >= bound for bound in _SURE)


def _evidence(name: str, depth: int, chance: float) -> Evidence:
    """Without its rank, which says little more: what is split too finely is never counted."""
    halved, sureness = bins(chance)
    return Evidence(name, depth, count_bin=sureness, probability_bin=halved)
