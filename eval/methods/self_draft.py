"""Self-Draft as its paper has it: branches of random tokens, a filling phase, n-grams alone.

The paper starts each branch with several random tokens and does not say how many; here there are
three, drawn from the prompt. While the branches grow to their length nothing is drafted (its
algorithm 1). Then the n-grams that branches have yielded are looked up by the last token alone, the
freshest first, and a corpus where a cache has one. The paper checks each candidate as a row of its
own; here they are one tree, which gives the same tokens for fewer queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from selfspec.draft.calibration import Calibration, Kinds
from selfspec.draft.sources import Cursor, Source
from selfspec.draft.sources.branches import Branches
from selfspec.draft.sources.grams import GRAM_LENGTH, GramQueues, Tail
from selfspec.records import Candidate, Evidence, StepRecord, TopK

_NUM_RANDOM = 3
# No chance is known of an n-gram. These let a fresh one be drafted whole before a stale one begins.
_FRESHEST, _NEXT = 0.95, 0.7


class FreshFirst(Calibration):
    """Believes that a fresher n-gram is likelier, and counts nothing."""

    @property
    def probability(self) -> Callable[[Kinds], float]:
        """By the rank alone."""
        return lambda kinds: max(_FRESHEST * _NEXT ** (kind.rank - 1) for kind in kinds)

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned from it."""


class RandomStarts(Branches):
    """Branches that begin with several random tokens, and yield n-grams of full length only."""

    def observe(self, record: StepRecord) -> None:
        filled = all(len(branch) >= self._max_length for branch in self.tokens)
        super().observe(record)
        record.grams = [gram for gram in record.grams if filled and len(gram) == GRAM_LENGTH]

    def _start(self) -> list[int]:
        return [self._random.choice(self._padding) for _ in range(_NUM_RANDOM)]

    def _restart_twins(self) -> None:
        """The paper lets branches that came to say the same go on."""


class GramSource(Source):
    """Opens an empty context cache for each row."""

    name = "grams"

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> GramCursor:
        return GramCursor(prompt_ids[-1] if prompt_ids else -1)


class GramCursor(Cursor):
    """The n-grams that begin with the last token."""

    def __init__(self, last_token: int) -> None:
        self._last_token = last_token
        self._queues = GramQueues()

    def root(self) -> list[Tail]:
        return self._queues.behind(self._last_token)

    def expand(self, state: list[Tail]) -> list[Candidate]:
        tokens = dict.fromkeys(tail[0] for tail in state)
        return [(token, Evidence(GramSource.name, rank=n)) for n, token in enumerate(tokens, 1)]

    def follow(self, state: list[Tail], token: int) -> list[Tail] | None:
        return [tail[1:] for tail in state if tail[0] == token and tail[1:]] or None

    def observe(self, record: StepRecord) -> None:
        """Takes the branches' n-grams in."""
        self._last_token = record.committed_ids[-1]
        for gram in record.grams:
            self._queues.add(gram)


class Filling(Source):
    """A source that names nothing until an answer has as many tokens as a branch."""

    def __init__(self, source: Source, num_tokens: int) -> None:
        self.name = source.name
        self._source, self._num_tokens = source, num_tokens

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> _FillingCursor:
        return _FillingCursor(self._source.open(prompt_ids, learns=learns), self._num_tokens)

    def copy(self) -> Filling:
        """Never asked for: measured in one session."""
        raise NotImplementedError

    def observe_pairs(self, pairs: NDArray[Any], top: TopK) -> None:
        """What the source learns from the prompt."""
        self._source.observe_pairs(pairs, top)


class _FillingCursor(Cursor):
    def __init__(self, cursor: Cursor, num_tokens: int) -> None:
        self._cursor, self._num_missing = cursor, num_tokens

    def root(self) -> Any:
        return self._cursor.root()

    def expand(self, state: Any) -> list[Candidate]:
        return self._cursor.expand(state) if self._num_missing <= 0 else []

    def follow(self, state: Any, token: int) -> Any:
        return self._cursor.follow(state, token)

    def observe(self, record: StepRecord) -> None:
        self._num_missing -= len(record.committed_ids)
        self._cursor.observe(record)
