"""Where candidates come from: one protocol, one registry.

A `Source` belongs to a `SelfSpec` and keeps what outlives a request. For each row of each call
it opens a `Cursor`, which walks that row's text. Sources handle ints, lists and numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from selfspec.records import Candidate, StepRecord, TopK
from selfspec.sources.context import ContextSource
from selfspec.sources.lut import LutSource
from selfspec.sources.runners import RunnersSource

__all__ = ["REGISTRY", "ContextSource", "Cursor", "LutSource", "RunnersSource", "Source"]


class Cursor(Protocol):
    """One source at one place of one row's text."""

    def root(self) -> Any:
        """The state at the end of the committed text."""
        ...

    def expand(self, state: Any) -> list[Candidate]:
        """Likely next tokens behind `state`, best first; a token at most once."""
        ...

    def follow(self, state: Any, token: int) -> Any | None:
        """The state behind a token that another source named; None: nothing to say there."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learns from a verified step; afterwards `root` stands behind its committed tokens."""
        ...


class Source(Protocol):
    """What a `SelfSpec` keeps of one way to draft."""

    name: str

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> Cursor:
        """A cursor at the end of the prompt."""
        ...

    def observe_prompt(self, token_ids: Sequence[int], top: TopK) -> None:
        """Learns what the model said behind each of the prompt's tokens."""
        ...

    def copy(self) -> Source:
        """A copy that learns for one request alone."""
        ...


REGISTRY: dict[str, Callable[[int, int], Source]] = {
    "lut": lambda vocab_size, top_k: LutSource(vocab_size, top_k),
    "context": lambda _vocab_size, top_k: ContextSource(top_k),
    "runners": lambda _vocab_size, _top_k: RunnersSource(),
}
