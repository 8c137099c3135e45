"""The LUT pair: for each token its top-K next tokens (t-LUT) and their probabilities (p-LUT).

Fed by every place where the model spoke: prompt, accepted nodes and rejected ones (DIAA). Does
not know the text: one token of context is all that it sees.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from selfspec.records import Candidate, StepRecord, TopK
from selfspec.sources.bins import evidence_table, stored_exponents

__all__ = ["LutCursor", "LutSource"]


class LutSource:
    """The pair of tables, shared by all rows and calls of a `SelfSpec`.

    int32 and fp16: 6.2 MB for a vocabulary of 128,256 and K = 8. An empty entry is -1. A row is
    replaced whole by the newest top-K: keeping older entries or averaging guessed no better.
    """

    name = "lut"

    def __init__(self, vocab_size: int, top_k: int) -> None:
        self.token_ids: NDArray[np.int32] = np.full((vocab_size, top_k), -1, np.int32)
        self.probabilities: NDArray[np.float16] = np.zeros((vocab_size, top_k), np.float16)
        self._evidence = evidence_table("lut", top_k)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory of the two tables."""
        return self.token_ids.nbytes + self.probabilities.nbytes

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> LutCursor:
        """A cursor behind the last token of the prompt."""
        return LutCursor(self, prompt_ids[-1] if prompt_ids else None, learns=learns)

    def copy(self) -> LutSource:
        """A copy for one request; costs one pass over both tables."""
        with self._lock:
            twin = LutSource(0, len(self._evidence))
            twin.token_ids = self.token_ids.copy()
            twin.probabilities = self.probabilities.copy()
        return twin

    def learn(self, token_ids: Sequence[int], top: TopK) -> None:
        """Sets the row of each token to its newest top-K; of repeated tokens the last one wins.

        Costs two indexed writes, whatever the number of tokens.
        """
        with self._lock:
            self.token_ids[token_ids] = top.ids
            self.probabilities[token_ids] = top.probabilities

    observe_prompt = learn

    def next_tokens(self, token: int) -> list[Candidate]:
        """The candidates of a token's row, likeliest first."""
        with self._lock:
            ids = self.token_ids[token].tolist()
            exponents = stored_exponents(self.probabilities[token])
        return [
            Candidate(id_, kinds[exponent], id_)
            for id_, exponent, kinds in zip(ids, exponents, self._evidence, strict=True)
            if id_ >= 0
        ]


class LutCursor:
    """A row's place in the LUTs, which is just its last token."""

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
        """Learns from all nodes; the accepted ones last, so that they win over the others."""
        self._last_token = record.committed_ids[-1] if record.committed_ids else self._last_token
        if not self._learns or record.top is None:
            return
        order = _path_last(len(record.tree), record.path)
        tokens = np.asarray(record.tree.tokens)[order]
        self._source.learn(
            tokens,  # type: ignore[arg-type]
            TopK(record.top.ids[order], record.top.probabilities[order]),
        )


def _path_last(num_nodes: int, path: Sequence[int]) -> list[int]:
    on_path = set(path)
    return [node for node in range(num_nodes) if node not in on_path] + list(path)
