"""What rows of an engine have written, for the file of `remember`; prompts are not in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources import Source

_MAX_TOKENS = 1 << 18
_NO_TEXT = np.zeros((0, 4), np.int64)


class Answers(Source):
    """A list of tokens, each with the serial number of its row; the newest ones are kept.

    It is a source so that memory files keep it, and is never opened, since `Chains` drafts.

    >>> answers = Answers()
    >>> answers.append(np.array([1, 2, 1]), np.array([[8, 9, 5], [0, 7, 6], [9, 5, 4]]))
    >>> answers.arrays()["tokens"]
    array([ 5,  4, -1,  6, -1], dtype=int32)
    """

    name = "answers"

    def __init__(self) -> None:
        self._written: list[NDArray[np.int64]] = []  # each (N, 4): serials, then as in `append`
        self._num_tokens = 0
        self._num_taken = 0
        self.kept = np.zeros(0, np.int32)  # What the file held, with -1 after each answer.

    def append(self, serials: NDArray[np.int64], text: NDArray[np.int64]) -> None:
        """Takes each row's next tokens, in order, after the two before each; (N, 3)."""
        self._written.append(np.column_stack([serials, text]))
        self._num_tokens += len(text)
        while self._num_tokens > _MAX_TOKENS:
            self._num_tokens -= len(self._written.pop(0))
            self._num_taken = max(self._num_taken - 1, 0)

    def taken(self) -> NDArray[np.int64]:
        """What was written since the last time that this was asked: (N, 3) as in `append`."""
        start, self._num_taken = self._num_taken, len(self._written)
        return np.concatenate([_NO_TEXT, *self._written[start : self._num_taken]])[:, 1:]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The answers one after the other, each with -1 at its end."""
        written = np.concatenate([_NO_TEXT, *list(self._written)])
        written = written[np.argsort(written[:, 0], kind="stable")]
        ends = 1 + np.flatnonzero(np.diff(written[:, 0], append=-1))
        answers = np.insert(written[:, 3].astype(np.int32), ends, -1)
        tokens = np.concatenate([self.kept, answers])
        return {"tokens": tokens} if len(tokens) else {}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.kept = arrays["tokens"].astype(np.int32)
