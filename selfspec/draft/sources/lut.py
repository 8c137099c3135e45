"""The LUT pair: for each token its top-K next tokens (t-LUT) and their probabilities (p-LUT).

Fed by all that the model says: in the prompt, at accepted nodes and at rejected ones (DIAA). It
does not know the text: one token of context is all that it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.rows import Rows
from selfspec.records import Candidate, StepRecord, TopK

__all__ = ["LutCursor", "LutSource"]


class LutSource:
    """The pair of tables, shared by all rows and calls of a `SelfSpec`.

    6.2 MB for a vocabulary of 128,256 and K = 8. A prompt may hold tokens beyond it, which a model
    can read and never says; nothing is learned behind them.
    """

    name = "lut"

    def __init__(self, vocab_size: int, top_k: int) -> None:
        self.rows = Rows(self.name, vocab_size, top_k)

    @property
    def nbytes(self) -> int:
        """The bytes of both tables."""
        return self.rows.nbytes

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> LutCursor:
        """A cursor behind the last token of the prompt."""
        return LutCursor(self, prompt_ids[-1] if prompt_ids else None, learns=learns)

    def copy(self) -> LutSource:
        """A copy for one request; costs one pass over both tables."""
        twin = LutSource(0, 0)
        with self.rows.lock:
            twin.rows = self.rows.copy()
        return twin

    def learn(self, token_ids: Sequence[int] | NDArray[Any], top: TopK) -> None:
        """Sets the row of each token to its newest top-K; of repeated tokens the last one wins.

        Costs two indexed writes, whatever the number of tokens.
        """
        tokens = np.asarray(token_ids, np.int64)
        known = tokens < len(self.rows.token_ids)
        if not known.all():
            tokens, top = tokens[known], top.at(known)
        with self.rows.lock:
            self.rows.write(tokens, top)

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Learns what follows the second token of each pair."""
        self.learn(pairs[:, 1], top)

    def next_tokens(self, token: int) -> list[Candidate]:
        """The candidates of a token's row, likeliest first."""
        with self.rows.lock:
            return self.rows.read(token) if token < len(self.rows.token_ids) else []

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The rows that are not empty, by token: what a cache keeps."""
        with self.rows.lock:
            tokens = self.rows.held()
            top = self.rows.part(tokens)
        return {"tokens": tokens.astype(np.int32), **top._asdict()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Puts back what `arrays` gave, recorded with whatever K."""
        top = self.rows.fitted(TopK(arrays["ids"], arrays["probabilities"]))
        self.learn(arrays["tokens"], top)


class LutCursor:
    """What the LUTs know behind the end of one row's text, which is its last token."""

    def __init__(self, source: LutSource, last_token: int | None, *, learns: bool) -> None:
        self._source = source
        self._last_token = last_token
        self._learns = learns

    def root(self) -> int | None:
        """The last committed token."""
        return self._last_token

    def expand(self, state: int | None) -> list[Candidate]:
        """The top-K behind the token `state`."""
        return [] if state is None else self._source.next_tokens(state)

    def follow(self, state: int | None, token: int) -> int:
        """Any token has a row of its own."""
        return token

    def observe(self, record: StepRecord) -> None:
        """Learns from all nodes."""
        self._last_token = record.committed_ids[-1] if record.committed_ids else self._last_token
        if self._learns and (lesson := record.lesson):
            self._source.observe_pairs(*lesson)
