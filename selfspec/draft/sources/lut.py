"""Look-up tables: what the model predicted after a token (order 1), or after two (order 2).

Fed by all predictions of the model: in the prompt, at accepted nodes and at rejected ones (DIAA).
They see one token of context, or two. The first order has a row for each token. The second one
hashes pairs to slots and stores their keys, so that a pair never reads the row of another one: of
two pairs that share a slot the newer one has it, and the other is not found.

A probability is evidence by its bin, which is read off the bits of an fp16. Bins are few, by powers
of two: each kind of evidence, and each way in which kinds meet, has a rate of its own to be
counted, and what is split too finely is never counted enough.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.source import LastTokensCursor, RowStart, Source
from selfspec.records import MAX_BIN, Candidate, Evidence, TopK

Indices = NDArray[np.int64]

# An fp16 has 10 bits of mantissa, then the exponent.
MANTISSA_BITS = 10

# The exponent of p in [0.5, 1) is 14. Each halving has one less, and 1.0 itself one more.
_TOP_EXPONENT = 14
_SLOT_BITS = 17
# An odd number without pattern, so that neighbouring keys get slots far apart.
_SPREAD = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def evidence_table(source: str, top_k: int) -> list[list[Evidence]]:
    """Every evidence that a recorded top-K can give, made once: [rank - 1][stored exponent].

    A stored exponent are the bits of an fp16 above its mantissa: 0 to 15 for a probability, and up
    to 63 for what is none.
    """
    bins = [min(max(_TOP_EXPONENT - exponent, 0), MAX_BIN) for exponent in range(16)]
    bins += [MAX_BIN] * 48  # A NaN or a negative number counts as very unlikely.
    return [
        [Evidence(source, rank=rank, probability_bin=bin_) for bin_ in bins]
        for rank in range(1, top_k + 1)
    ]


class LutSource(Source):
    """One table, shared by all rows and calls of a `SelfSpec`. Safe for several threads.

    A row has `top_k` entries, the likeliest first; an empty one is -1. It is replaced whole by the
    newest top-K: to keep older entries, as DIAA does, guessed worse.

    For K = 8, the first order takes 6.2 MB for a vocabulary of 128,256, and the second one 7.3 MB
    for 131,072 slots. A prompt may hold tokens beyond the vocabulary, which a model can read and
    never predicts; nothing is learned after them.
    """

    def __init__(
        self, vocab_size: int, top_k: int, *, order: int = 1, slot_bits: int = _SLOT_BITS
    ) -> None:
        self.name = "lut" if order == 1 else "lut2"
        self._order = order
        self._vocab_size = vocab_size
        self._shift = 64 - slot_bits
        self._evidence = evidence_table(self.name, top_k)
        self._lock = threading.Lock()
        num_rows = vocab_size if order == 1 else 1 << slot_bits
        self._hold(
            np.full(0 if order == 1 else num_rows, -1, np.int64),
            np.full((num_rows, top_k), -1, np.int32),
            np.zeros((num_rows, top_k), np.float16),
        )

    @property
    def nbytes(self) -> int:
        """The bytes of keys and rows."""
        return self._keys.nbytes + self.token_ids.nbytes + self.probabilities.nbytes

    def open(self, row: RowStart) -> LastTokensCursor:
        return LastTokensCursor(self.next_tokens, (-1, -1, *row.prompt_ids[-2:]), 2)

    def copy(self) -> LutSource:
        """A copy for one request; costs one pass over the table."""
        twin = copy.copy(self)
        twin._lock = threading.Lock()
        with self._lock:
            twin._hold(self._keys.copy(), self.token_ids.copy(), self.probabilities.copy())
        return twin

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Sets the row of each to its newest top-K; of repeated ones the last one wins.

        Costs a few indexed writes, whatever the number of pairs.
        """
        tokens = pairs[:, -self._order :]
        known = tokens.view(np.uint64) < self._vocab_size  # One below 0 is a large number here.
        if not known.all():
            tokens, top = tokens[known.all(-1)], top.at(known.all(-1))
        keys, rows = self._places(tokens)
        with self._lock:
            if self._order == 2:
                self._keys[rows] = keys
            self.token_ids[rows] = top.ids
            self.probabilities[rows] = top.probabilities

    def next_tokens(self, last: tuple[int, ...]) -> list[Candidate]:
        """The candidates after two tokens, likeliest first; -1 where the text is shorter."""
        before, row = last
        if not 0 <= row < self._vocab_size or (self._order == 2 and before < 0):
            return []
        key = before * self._vocab_size + row
        if self._order == 2:
            row = (key * _SPREAD & _WORD) >> self._shift
        top_k = len(self._evidence)
        start, end = row * top_k, (row + 1) * top_k
        with self._lock:
            if self._order == 2 and self._flat_keys[row] != key:
                return []
            ids, bits = self._flat_ids[start:end].tolist(), self._flat_bits[start:end]
            entries = [
                (token, of_rank[half >> MANTISSA_BITS])
                for token, of_rank, half in zip(ids, self._evidence, bits, strict=True)
            ]
        return entries if min(ids) >= 0 else [entry for entry in entries if entry[0] >= 0]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The rows that are not empty, by token or by pair: what a cache keeps."""
        with self._lock:
            if self._order == 1:
                rows = np.flatnonzero(self.token_ids[:, 0] >= 0)
                return {"tokens": rows.astype(np.int32), **self._part(rows)._asdict()}
            rows = np.flatnonzero(self._keys >= 0)
            rows = rows[np.argsort(self._keys[rows])]
            pairs = np.stack(np.divmod(self._keys[rows], self._vocab_size), axis=-1)
            return {"pairs": pairs.astype(np.int32), **self._part(rows)._asdict()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Puts back what `arrays` gave; rows of another K are cut or filled with empty entries."""
        keys = arrays["tokens"][:, None] if self._order == 1 else arrays["pairs"]
        num_rows, top_k = len(keys), self.token_ids.shape[1]
        ids = np.full((num_rows, top_k), -1, np.int32)
        probabilities = np.zeros((num_rows, top_k), np.float16)
        shared = min(top_k, arrays["ids"].shape[1])
        ids[:, :shared] = arrays["ids"][:, :shared]
        probabilities[:, :shared] = arrays["probabilities"][:, :shared]
        self.observe_pairs(keys.astype(np.int64), TopK(ids, probabilities))

    def _places(self, tokens: NDArray[np.int64]) -> tuple[Indices, Indices]:
        """The keys of tokens or pairs, and the numbers of their rows."""
        if self._order == 1:
            return tokens[:, 0], tokens[:, 0]
        keys = tokens[:, 0] * self._vocab_size + tokens[:, 1]
        spread = keys.view(np.uint64) * np.uint64(_SPREAD)
        return keys, (spread >> np.uint64(self._shift)).view(np.int64)

    def _part(self, rows: Indices) -> TopK:
        return TopK(self.token_ids[rows], self.probabilities[rows])

    def _hold(
        self,
        keys: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        probabilities: NDArray[np.float16],
    ) -> None:
        self._keys, self.token_ids, self.probabilities = keys, token_ids, probabilities
        # Views that Python reads faster than arrays, a row at a time.
        self._flat_keys = keys.data
        self._flat_ids = token_ids.reshape(-1).data
        self._flat_bits = probabilities.reshape(-1).view(np.uint16).data
