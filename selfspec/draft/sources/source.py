"""What a way to draft must have: a source, and a cursor of it for each row of each call.

A source belongs to a `SelfSpec` and keeps what outlives a request. A cursor walks one row's text.
Both handle ints, lists and numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.records import Candidate, Draws, Evidence, StepRecord, TimeBudget, TopK


def nothing() -> None:
    """Counts no forward."""


def shared_length(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts have in common before they part.

    >>> shared_length((1, 2, 3), (1, 2, 4, 5))
    2
    """
    pairs = enumerate(zip(ids, others, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(ids), len(others)))


@dataclass(frozen=True, kw_only=True, eq=False)
class RowStart:
    """A row at the end of its prompt, as a source finds it when it opens a cursor.

    Attributes:
        prompt_ids: The text so far, without padding. What an encoder has read comes first.
        learns: Whether sources may learn from this row.
        max_new_tokens: The most tokens that may follow.
        budget: What a cursor asks before it takes time of its own.
        num_rows: How many rows share its forwards.
        count_forward: To be called for each forward of a model that drafts take.
        draws: How its next tokens will be drawn.
        kv: The slots of its keys and values, a `TreeKV`; None where it has none.
        states: (N, D): what entered the output head for the last tokens; None if nobody kept it.
    """

    prompt_ids: Sequence[int] = ()
    learns: bool = True
    max_new_tokens: int = maxsize
    budget: TimeBudget = TimeBudget()  # noqa: RUF009 has no state
    num_rows: int = 1
    count_forward: Callable[[], None] = nothing
    draws: Draws = Draws()  # noqa: RUF009 has no state
    kv: Any = None
    states: Any = None


class Cursor:
    """A source at work for one row of one call."""

    # Evidence of rank 0, which counts against tokens that others name and this cursor does not.
    evidence_against: Evidence | None = None
    # Does `read` take time?
    takes_time = False
    # Whether it is to see the hidden states of the next step's nodes, in its `StepRecord`.
    wants_states = False

    def prepare(self) -> None:
        """Called before each step. A cursor that takes time to begin does so here."""

    def root(self) -> Any:
        """The state at the end of the committed text."""
        raise NotImplementedError

    def read(self, state: Any, score: float) -> None:
        """Called before `expand` if the cursor `takes_time`.

        `score` is how likely the state is; where other cursors are sure of what comes next, how
        likely it is that the text comes to this state and goes on otherwise.
        """

    def expand(self, state: Any) -> list[Candidate]:
        """Likely next tokens after `state`, best first; a token at most once."""
        raise NotImplementedError

    def possible(self, state: Any, tokens: Iterable[int]) -> Iterable[int]:
        """Called after `expand` with all tokens that are named: those of them that may come."""
        return tokens

    def follow(self, state: Any, token: int) -> Any | None:
        """The state after a token of any source; None: this cursor knows nothing there."""
        return None

    def observe(self, record: StepRecord) -> None:
        """Learns from a verified step; then `root` is the state after its committed tokens."""


class Source:
    """One way to draft, with what it has learned. One that learns nothing needs only `open`."""

    name: str

    @property
    def nbytes(self) -> int:
        """The bytes of what a cache can keep of it, however much of them is in use."""
        return 0

    def open(self, row: RowStart) -> Cursor | None:
        """A cursor at the end of the prompt; None if it has nothing to say of this row."""
        raise NotImplementedError

    def num_states(self, num_rows: int) -> int:
        """How many of a prompt's last hidden states it learns from in a batch of `num_rows`."""
        return 0

    def before_step(self, num_rows: int, budget: TimeBudget) -> None:
        """Called once before each step that rows share."""

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Learns what the model predicted after each pair (N, 2) of a prompt's or a tree's tokens.

        One call teaches what a step of several rows has shown; of equal pairs the last one is the
        newest.
        """

    def copy(self) -> Source:
        """A copy that learns for one request alone."""
        return self

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All that was learned and that a cache can keep; equal memories give equal arrays."""
        return {}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Learns what `arrays` gave."""


class LastTokensCursor(Cursor):
    """What a source names after the last `num` tokens of one row's text."""

    def __init__(
        self,
        next_tokens: Callable[[tuple[int, ...]], list[Candidate]],
        prompt_ids: Sequence[int],
        num: int,
    ) -> None:
        self._next_tokens, self._num = next_tokens, num
        self._last = tuple(prompt_ids[-num:])

    def root(self) -> tuple[int, ...]:
        return self._last

    def expand(self, state: tuple[int, ...]) -> list[Candidate]:
        return self._next_tokens(state)

    def follow(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)[-self._num :]

    def observe(self, record: StepRecord) -> None:
        self._last = (*self._last, *record.committed_ids)[-self._num :]
