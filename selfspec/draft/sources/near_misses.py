"""What the model nearly chose: the near misses of its last logits, as children of the root.

A word that was nearly chosen often comes right after the one that was. The near misses also fill a
tree whose root the LUTs have never seen.
"""

from __future__ import annotations

import numpy as np

from selfspec.draft.sources.lut import MANTISSA_BITS, evidence_table
from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import Candidate, StepRecord

_NUM_NAMED = 4


class NearMissesSource(Source):
    name = "near_misses"

    def open(self, row: RowStart) -> NearMissesCursor:
        return NearMissesCursor()


class NearMissesCursor(Cursor):
    """The near misses of one row's last logits."""

    _evidence = evidence_table("near_misses", _NUM_NAMED)

    def __init__(self) -> None:
        self._near_misses: tuple[Candidate, ...] = ()

    def root(self) -> tuple[Candidate, ...]:
        return self._near_misses

    def expand(self, state: tuple[Candidate, ...]) -> list[Candidate]:
        return list(state)

    def observe(self, record: StepRecord) -> None:
        """Takes the near misses from the last accepted node."""
        self._near_misses = ()
        if record.top is None or not record.committed_ids:
            return
        ids, probabilities = record.top.at(record.path[-1])
        others = [
            (id_, half >> MANTISSA_BITS)
            for id_, half in zip(ids.tolist(), probabilities.view(np.uint16).tolist(), strict=True)
            if id_ != record.committed_ids[-1]
        ]
        self._near_misses = tuple(
            (id_, kinds[exponent])
            for (id_, exponent), kinds in zip(others, self._evidence, strict=False)
        )
