"""What the model nearly chose: the runners-up of its last logits, as children of the root.

A word that was nearly chosen often comes right after the one that was. The runners-up also fill a
tree whose root the LUTs have never seen.
"""

from __future__ import annotations

import numpy as np

from selfspec.draft.sources.lut import MANTISSA_BITS, evidence_table
from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import Candidate, StepRecord

_MAX_RUNNERS = 4

Runners = tuple[Candidate, ...]


class RunnersSource(Source):
    name = "runners"

    def open(self, row: RowStart) -> RunnersCursor:
        return RunnersCursor()


class RunnersCursor(Cursor):
    """The runners-up of one row's last logits."""

    _evidence = evidence_table("runners", _MAX_RUNNERS)

    def __init__(self) -> None:
        self._runners: Runners = ()

    def root(self) -> Runners:
        return self._runners

    def expand(self, state: Runners) -> list[Candidate]:
        return list(state)

    def observe(self, record: StepRecord) -> None:
        """Takes the runners-up from the last accepted node."""
        self._runners = ()
        if record.top is None or not record.committed_ids:
            return
        ids, probabilities = record.top.at(record.path[-1])
        others = [
            (id_, half >> MANTISSA_BITS)
            for id_, half in zip(ids.tolist(), probabilities.view(np.uint16).tolist(), strict=True)
            if id_ != record.committed_ids[-1]
        ]
        self._runners = tuple(
            (id_, kinds[exponent])
            for (id_, exponent), kinds in zip(others, self._evidence, strict=False)
        )
