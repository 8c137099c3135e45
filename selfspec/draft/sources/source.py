"""What a way to draft must have: a source, and a cursor of it for each row of each call.

A source belongs to a `SelfSpec` and keeps what outlives a request. A cursor walks one row's text.
Both handle ints, lists and numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from selfspec.records import Candidate, Evidence, StepRecord, TopK

__all__ = ["Cursor", "Source", "TimeBudget"]


class TimeBudget(Protocol):
    """What a cursor may spend that takes time of its own."""

    def worth(self, seconds: float) -> float:
        """How many tokens it must bring for some seconds to pay."""
        ...

    def affords(self, seconds: float | None) -> bool:
        """May it take some seconds to begin? None: nobody knows how many it takes."""
        ...

    def charge(self, seconds: float) -> None:
        """Takes in what it took to begin."""
        ...


class Cursor:
    """One source as one row of a call asks it."""

    # Evidence of rank 0, which counts against tokens that others name and this cursor does not.
    evidence_against: Evidence | None = None
    # Whether `read` is called before `expand`. A cursor that takes time to look does so there.
    reads_ahead = False
    # Whether it knows of tokens that can't come. Then `possible` is asked about all that are named.
    is_guard = False

    def prepare(self) -> None:
        """Called before each step. A cursor that takes time to begin does so here."""

    def root(self) -> Any:
        """The state at the end of the committed text."""
        raise NotImplementedError

    def read(self, state: Any, score: float) -> None:
        """Called before `expand` if the cursor reads ahead; `score` is how likely the state is."""

    def expand(self, state: Any) -> list[Candidate]:
        """Likely next tokens after `state`, best first; a token at most once."""
        raise NotImplementedError

    def possible(self, state: Any, tokens: Iterable[int]) -> Iterable[int]:
        """Called after `expand` if it `is_guard`: those of the tokens that may come."""
        return tokens

    def follow(self, state: Any, token: int) -> Any | None:
        """The state after a token of any source; None: this cursor knows nothing there."""
        return None

    def observe(self, record: StepRecord) -> None:
        """Learns from a verified step; then `root` is the state after its committed tokens."""


class Source:
    """What a `SelfSpec` keeps of one way to draft. If nothing, `open` is all that it needs."""

    name: str

    @property
    def nbytes(self) -> int:
        """The bytes of what a cache can keep of it, however much of them is in use."""
        return 0

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> Cursor:
        """A cursor at the end of the prompt."""
        raise NotImplementedError

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Learns what the model predicted after each pair (N, 2) of the prompt's tokens."""

    def observe_text(self, pairs: NDArray[np.int64], next_ids: NDArray[np.int64]) -> None:
        """Learns the token that came after each pair (N, 2), where no model gives its chances."""

    def copy(self) -> Source:
        """A copy that learns for one request alone."""
        return self

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All that was learned and a cache can keep, the same for the same memory."""
        return {}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Learns what `arrays` gave."""
