"""What a way to draft must have: a source, and a cursor of it for each row of each call.

A source belongs to a `SelfSpec` and keeps what outlives a request. A cursor walks one row's text.
Both handle ints, lists and numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.records import Candidate, Evidence, StepRecord, TopK

__all__ = ["Cursor", "Source"]


class Cursor:
    """One source as one row of a call asks it."""

    # What a cursor says of tokens that it does not name beside others, as evidence of rank 0. One
    # that has it takes time to look, so it is told by `read` where that is worth it. None: nothing.
    unnamed: Evidence | None = None

    def root(self) -> Any:
        """The state at the end of the committed text."""
        raise NotImplementedError

    def read(self, state: Any, score: float) -> None:
        """Called before `expand` if there is `unnamed`; the score is how likely the state is."""

    def expand(self, state: Any) -> list[Candidate]:
        """Likely next tokens behind `state`, best first; a token at most once."""
        raise NotImplementedError

    def follow(self, state: Any, token: int) -> Any | None:
        """The state behind a token, whoever named it; None: nothing to say there."""
        return None

    def observe(self, record: StepRecord) -> None:
        """Learns from a verified step; afterwards `root` stands behind its committed tokens."""


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
        """Learns what the model said behind each pair (N, 2) of the prompt's tokens."""

    def copy(self) -> Source:
        """A copy that learns for one request alone."""
        return self

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All that was learned and a cache can keep, the same for the same memory."""
        return {}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Learns what `arrays` gave."""
