"""What rows of an engine have written: where a text ends as some earlier answer did at one point,
that answer says what may come next.

An engine has many users at once, and their answers resemble one another. The newest ones are kept,
in the file of `remember` too. Prompts are not: a row's own is in its context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources import Cursor, Source
from selfspec.records import Candidate, Evidence, StepRecord

__all__ = ["AnswersCursor", "AnswersSource"]

# A text is found by this many tokens.
_KEY_LENGTH = 4
_MAX_KEYS = 1 << 18
_MAX_ANSWERS = 4096
# Matches count as the same evidence from one of these lengths to the next.
_LENGTHS = (4, 6, 9, 16)

Key = tuple[int, ...]


class Match(NamedTuple):
    """The last tokens of a text, drafts included, and what an earlier answer said behind them."""

    key: Key
    answer: Sequence[int] = ()
    position: int = 0  # of the next token in that answer
    length: int = 0  # the tokens before it that are the same


class AnswersSource(Source):
    """The newest place behind each few tokens that an answer had in a row.

    >>> source, answer = AnswersSource(), []
    >>> for token in (1, 2, 3, 4, 5):
    ...     source.append(answer, token)
    >>> source.find((1, 2, 3, 4)).position
    4
    """

    name = "answers"

    def __init__(self) -> None:
        self._places: dict[Key, tuple[list[int], int]] = {}
        self._answers: deque[list[int]] = deque(maxlen=_MAX_ANSWERS)

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> AnswersCursor:
        """A cursor that writes down an answer behind the prompt."""
        self._answers.append([])
        return AnswersCursor(self, self._answers[-1])

    def find(self, key: Key) -> Match:
        """The newest place behind a key, if there is one; one look-up."""
        place = self._places.get(key)
        return Match(key) if place is None else Match(key, *place, _KEY_LENGTH)

    def append(self, answer: list[int], token: int) -> None:
        """Makes the end of an answer the newest place behind its last tokens, and adds a token."""
        key = tuple(answer[-_KEY_LENGTH:])
        answer.append(token)
        if len(key) < _KEY_LENGTH:
            return
        self._places.pop(key, None)
        self._places[key] = (answer, len(answer) - 1)
        if len(self._places) > _MAX_KEYS:
            del self._places[next(iter(self._places))]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The answers one behind the other, each with -1 at its end."""
        tokens = [token for answer in list(self._answers) if answer for token in (*answer, -1)]
        return {"tokens": np.array(tokens, np.int32)} if tokens else {}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes over what `arrays` gave, as if it had been written now."""
        answer: list[int] = []
        for token in arrays["tokens"].tolist():
            if token >= 0:
                self.append(answer, token)
            elif answer:
                self._answers.append(answer)
                answer = []


class AnswersCursor(Cursor):
    """One row's answer, and where an earlier one reads as it does at the end."""

    def __init__(self, source: AnswersSource, answer: list[int]) -> None:
        self._source = source
        self._answer = answer
        self._match = Match(())

    def root(self) -> Match:
        """The earlier answer at the end of this one."""
        return self._match

    def expand(self, state: Match) -> list[Candidate]:
        """Its next token."""
        if state.position >= len(state.answer):
            return []
        return [(state.answer[state.position], _evidence(state.length))]

    def follow(self, state: Match, token: int) -> Match:
        """The same answer as long as it says the same, and else the newest one that fits."""
        key = (*state.key, token)[-_KEY_LENGTH:]
        answer, position = state.answer, state.position
        if position < len(answer) and answer[position] == token:
            return Match(key, answer, position + 1, state.length + 1)
        return self._source.find(key)

    def observe(self, record: StepRecord) -> None:
        """Goes on behind the committed tokens, and lets other rows find them."""
        for token in record.committed_ids:
            self._match = self.follow(self._match, token)
            self._source.append(self._answer, token)


@lru_cache(maxsize=1024)
def _evidence(length: int) -> Evidence:
    return Evidence("answers", match_length=max(each for each in _LENGTHS if each <= length))
