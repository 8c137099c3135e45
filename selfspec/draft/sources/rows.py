"""Rows of recorded top-K tokens with their probabilities: what both LUT orders are made of.

Knows the numbers of rows, not what a row is about. Safe to read and write from several threads.

A probability is evidence by its bin, which is read off the bits of an fp16. Bins are few, by powers
of two: each kind of evidence, and each way in which kinds meet, has a rate of its own to be
counted, and what is split too finely is never counted enough.
"""

from __future__ import annotations

import copy
import threading

import numpy as np
from numpy.typing import NDArray

from selfspec.records import Evidence, TopK

__all__ = ["MANTISSA_BITS", "Rows", "evidence_table"]

Indices = NDArray[np.int64]

# An fp16 has 10 bits of mantissa, then the exponent.
MANTISSA_BITS = 10

# The exponent of p in [0.5, 1) is 14. Each halving has one less, and 1.0 itself one more.
_TOP_EXPONENT = 14
# Everything less likely than 1 in 64 shares the last bin.
_MAX_BIN = 6


def evidence_table(source: str, top_k: int) -> list[list[Evidence]]:
    """Every evidence that a recorded top-K can give, made once: [rank - 1][stored exponent].

    A stored exponent are the bits of an fp16 above its mantissa: 0 to 15 for a probability, and up
    to 63 for what is none.
    """
    bins = [min(max(_TOP_EXPONENT - exponent, 0), _MAX_BIN) for exponent in range(16)]
    bins += [_MAX_BIN] * 48  # A NaN or a negative number counts as very unlikely.
    return [
        [Evidence(source, rank=rank, probability_bin=bin_) for bin_ in bins]
        for rank in range(1, top_k + 1)
    ]


class Rows:
    """`num_rows` rows of `top_k` entries, int32 + fp16; an empty entry is -1.

    A row is replaced whole by the newest top-K. Keeping older entries, as DIAA does, guessed
    worse: what the model said last fits best.
    """

    def __init__(self, source: str, num_rows: int, top_k: int) -> None:
        self._hold(
            np.full((num_rows, top_k), -1, np.int32), np.zeros((num_rows, top_k), np.float16)
        )
        self._evidence = evidence_table(source, top_k)
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The bytes of the two tables."""
        return self.token_ids.nbytes + self.probabilities.nbytes

    def write(self, rows: Indices, top: TopK) -> None:
        """Replaces rows; of one that is named twice the last wins. The caller holds the lock."""
        self.token_ids[rows] = top.ids
        self.probabilities[rows] = top.probabilities

    def read(self, row: int) -> list[tuple[int, Evidence]]:
        """A row's entries, likeliest first. The caller holds the lock."""
        top_k = len(self._evidence)
        start, end = row * top_k, (row + 1) * top_k
        ids, bits = self._flat_ids[start:end].tolist(), self._flat_bits[start:end]
        kinds = [
            of_rank[half >> MANTISSA_BITS]
            for of_rank, half in zip(self._evidence, bits, strict=True)
        ]
        entries = zip(ids, kinds, strict=True)
        return list(entries) if min(ids) >= 0 else [entry for entry in entries if entry[0] >= 0]

    def held(self) -> Indices:
        """The rows that are not empty, in order."""
        return np.flatnonzero(self.token_ids[:, 0] >= 0)

    def part(self, rows: Indices) -> TopK:
        """A copy of some rows."""
        return TopK(self.token_ids[rows], self.probabilities[rows])

    def fitted(self, top: TopK) -> TopK:
        """Rows recorded with another K, cut or filled up with empty entries to this one."""
        num_rows, top_k = len(top.ids), self.token_ids.shape[1]
        ids = np.full((num_rows, top_k), -1, np.int32)
        probabilities = np.zeros((num_rows, top_k), np.float16)
        shared = min(top_k, top.ids.shape[1])
        ids[:, :shared] = top.ids[:, :shared]
        probabilities[:, :shared] = top.probabilities[:, :shared]
        return TopK(ids, probabilities)

    def copy(self) -> Rows:
        """A copy of everything. The caller holds the lock."""
        twin = copy.copy(self)
        twin.lock = threading.Lock()
        twin._hold(self.token_ids.copy(), self.probabilities.copy())
        return twin

    def _hold(self, token_ids: NDArray[np.int32], probabilities: NDArray[np.float16]) -> None:
        self.token_ids, self.probabilities = token_ids, probabilities
        # Views that Python reads faster than arrays, a row at a time.
        self._flat_ids = token_ids.reshape(-1).data
        self._flat_bits = probabilities.reshape(-1).view(np.uint16).data
