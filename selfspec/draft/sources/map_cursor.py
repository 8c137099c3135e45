"""What a map of the model's hidden states names at the end of the text.

Only the root has candidates of it: farther on, its guesses would rest on guesses. Knows tokens and
chances; the states are hidden by `StateMap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any, Protocol

from selfspec.draft.sources.source import Cursor, TimeBudget
from selfspec.records import (
    MAP,
    MAX_BIN,
    Candidate,
    Evidence,
    Likely,
    StepRecord,
    halvings,
    sources_of,
)


class StateMap(Protocol):
    """A map of a text's hidden states."""

    def begin(self) -> None:
        """Learns the prompt."""
        ...

    def name(self, ids: Iterable[int]) -> None:
        """Adds tokens to those among which the likeliest are looked for."""
        ...

    def learn(
        self, ids: Sequence[int], parents: Sequence[int], path: Sequence[int], states: Any
    ) -> None:
        """Takes in the nodes of a tree at the end of the text, which goes on along the path."""
        ...

    def skip(self) -> None:
        """The text went on, and nobody knows the states."""
        ...

    def likely(self, token: int, num: int) -> Likely:
        """The likeliest tokens after the last one, `token`."""
        ...


class MapGate(Protocol):
    """Whether the maps of all rows are asked, and what comes of it."""

    is_wanted: bool  # In the next step?

    def observe(self, *, seconds: float, tokens: float) -> None:
        """Takes in a step in which it was asked."""
        ...


class MapCursor(Cursor):
    """The end of one row's text, as its map sees it.

    Whether it is asked is decided for all rows alike, before each step.
    """

    def __init__(self, state_map: StateMap, top_k: int, gate: MapGate, budget: TimeBudget) -> None:
        self._map = state_map
        self._top_k = top_k
        self._gate = gate
        self._budget = budget
        self._has_begun = False
        self._token: int | None = None
        self._seconds: float | None = None  # Those of this step; None if it was not asked.

    @property
    def wants_states(self) -> bool:
        """Only while it is asked, since the hook at the output head takes time."""
        return self._gate.is_wanted

    def prepare(self) -> None:
        """Learns the prompt."""
        if self._gate.is_wanted and not self._has_begun and self._budget.affords(None):
            start = perf_counter()
            self._map.begin()
            self._has_begun = True
            self._budget.charge(perf_counter() - start)

    def root(self) -> int | None:
        """The last committed token."""
        return self._token if self._gate.is_wanted and self._has_begun else None

    def expand(self, state: int | None) -> list[Candidate]:
        """What the map names after it."""
        if state is None:
            return []
        start = perf_counter()
        likely = self._map.likely(state, self._top_k)
        self._seconds = perf_counter() - start
        return [(token, _of_bin(halvings(chance))) for token, chance in likely]

    def observe(self, record: StepRecord) -> None:
        """Learns from all nodes, also from rejected ones."""
        tree = record.tree
        if record.states is not None:
            self._map.learn(tree.tokens, tree.parents, record.path, record.states)
        elif self._token is not None:  # The first step is the prompt's.
            self._map.skip()
        if self._gate.is_wanted and record.top is not None:
            self._map.name(record.top.ids.ravel().tolist())
        if self._seconds is not None:
            self._gate.observe(seconds=self._seconds, tokens=_brought(record))
            self._seconds = None
        if record.committed_ids:
            self._token = record.committed_ids[-1]


def _brought(record: StepRecord) -> int:
    """The accepted tokens that nobody would have drafted without the map."""
    accepted = record.accepted_nodes()
    is_its_own = accepted and sources_of(record.tree.evidence[accepted[0]]) == [MAP]
    return len(accepted) if is_its_own else 0


@lru_cache(maxsize=MAX_BIN + 1)
def _of_bin(probability_bin: int) -> Evidence:
    """Without its rank, which says little more: what is split too finely is never counted."""
    return Evidence(MAP, probability_bin=probability_bin)
