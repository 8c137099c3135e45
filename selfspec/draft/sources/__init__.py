"""Where candidates come from: one protocol, one registry.

A `Source` belongs to a `SelfSpec` and keeps what outlives a request. For each row of each call
it opens a `Cursor`, which walks that row's text. Sources handle ints, lists and numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.context import ContextSource
from selfspec.draft.sources.corpus import CorpusSource, CorpusTables
from selfspec.draft.sources.lut import LutSource
from selfspec.draft.sources.lut2 import Lut2Source
from selfspec.draft.sources.runners import RunnersSource
from selfspec.records import Candidate, Evidence, StepRecord, TopK

__all__ = [
    "REGISTRY",
    "ContextSource",
    "CorpusSource",
    "CorpusTables",
    "Cursor",
    "LastingSource",
    "LevelCursor",
    "Lut2Source",
    "LutSource",
    "RunnersSource",
    "Source",
]


class Cursor(Protocol):
    """One source as one row of a call asks it."""

    def root(self) -> Any:
        """The state at the end of the committed text."""
        ...

    def expand(self, state: Any) -> list[Candidate]:
        """Likely next tokens behind `state`, best first; a token at most once."""
        ...

    def follow(self, state: Any, token: int) -> Any | None:
        """The state behind a token, whoever named it; None: nothing to say there."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learns from a verified step; afterwards `root` stands behind its committed tokens."""
        ...


@runtime_checkable
class LevelCursor(Cursor, Protocol):
    """A cursor that finds out about many nodes as fast as about one; has a state for every node."""

    def prepare(self, states: Sequence[Any], scores: Sequence[float]) -> None:
        """Called before the first state is expanded; the others may be next, best first."""
        ...

    def unnamed(self, state: Any) -> Evidence | None:
        """Evidence against tokens that `expand` does not name; None if it knows nothing."""
        ...


class Source(Protocol):
    """What a `SelfSpec` keeps of one way to draft."""

    name: str

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> Cursor:
        """A cursor at the end of the prompt."""
        ...

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Learns what the model said behind each pair (N, 2) of the prompt's tokens."""
        ...

    def copy(self) -> Source:
        """A copy that learns for one request alone."""
        ...


@runtime_checkable
class LastingSource(Source, Protocol):
    """A source whose memory a cache can keep."""

    @property
    def nbytes(self) -> int:
        """Its memory in bytes, however much of it is in use."""
        ...

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All that was learned, the same for the same memory."""
        ...

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Learns what `arrays` gave."""
        ...


REGISTRY: dict[str, Callable[[int, int], Source]] = {
    "lut": LutSource,
    "lut2": Lut2Source,
    "context": lambda _vocab_size, top_k: ContextSource(top_k),
    "runners": lambda _vocab_size, _top_k: RunnersSource(),
}
