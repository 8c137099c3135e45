"""One verifier for rows that walk their trees alone and for rows that move together.

Walks down the trees of a batch and commits what the model says on the way. Knows neither where
trees come from, nor what becomes of the KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from selfspec.records import DraftTree, StepRecord
from selfspec.verify.choosers import Chooser, Visit
from selfspec.verify.transcript import Transcript
from selfspec.verify.walk import walk

__all__ = ["Verifier"]


@dataclass
class Verifier:
    """Turns trees and logits into committed tokens; serves one call.

    Rows walk in groups: each row is a group of its own, unless the chooser wants them all to move
    together. A group's walk ends where one of its rows has no child for its token.
    """

    chooser: Chooser
    transcript: Transcript

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step, and asks the device for what the walk needs."""
        self.chooser.read(logits)

    def verify(self, rows: Sequence[int], trees: Sequence[DraftTree]) -> list[StepRecord]:
        """What came of each tree, by the logits that were read; `rows` are the rows they are of."""
        indices = range(len(rows))
        groups = [indices] if self.chooser.moves_together else [[index] for index in indices]
        records = [record for group in groups for record in self._verify(group, rows, trees)]
        self.chooser.forget_before(min(map(self.transcript.num_new, rows)))
        return records

    def _verify(
        self, group: Sequence[int], rows: Sequence[int], trees: Sequence[DraftTree]
    ) -> Iterable[StepRecord]:
        committed: list[list[int]] = []  # One list of a token a row for each level of the walk.

        def commit(nodes: Sequence[int]) -> tuple[list[int], bool]:
            visits = [Visit(rows[i], i, node) for i, node in zip(group, nodes, strict=True)]
            tokens, stops = self.chooser.commit(visits, self.transcript)
            committed.append(tokens)
            return tokens, stops

        paths = walk([trees[index] for index in group], commit)
        for index, path, ids in zip(group, paths, zip(*committed, strict=True), strict=True):
            yield StepRecord(row=rows[index], tree=trees[index], path=path, committed_ids=[*ids])
