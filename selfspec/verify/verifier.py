"""Walks down the trees of a batch and commits what the model says on the way.

`Verifier` serves the rows of one call, whether they walk alone or move together. `RowVerifiers`
serves rows of many calls that come and go. Neither knows where trees come from, nor what becomes
of the KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from selfspec.records import DraftTree, NoiseAhead, StepRecord
from selfspec.verify.choosers import Chooser, Visit
from selfspec.verify.transcript import Transcript
from selfspec.verify.walk import walk

__all__ = ["BatchVerifier", "RowVerifiers", "Verifier"]


class BatchVerifier(Protocol):
    """What the engine asks about the rows of a batch, which it names by their index."""

    @property
    def moves_together(self) -> bool:
        """Do all rows get each token at once? Then none may leave before the others."""
        ...

    @property
    def pad_token_id(self) -> int:
        """What rows that stopped are filled up with, where rows move together."""
        ...

    @property
    def all_done(self) -> bool:
        """Has every row stopped?"""
        ...

    def is_done(self, row: int) -> bool:
        """Has a row stopped?"""
        ...

    def is_padded(self, row: int) -> bool:
        """Does a row get nothing but pads from now on?"""
        ...

    def max_depth(self, row: int) -> int:
        """How many drafts can still be committed to a row."""
        ...

    def noise_ahead(self, row: int) -> NoiseAhead | None:
        """The noise that a row's next tokens will be drawn with; None where it is not known."""
        ...

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step."""
        ...

    def verify(self, rows: Sequence[int], trees: Sequence[DraftTree]) -> list[StepRecord]:
        """What came of each tree, by the logits that were read; `rows` are the rows they are of."""
        ...


@dataclass
class Verifier:
    """Turns trees and logits into committed tokens; serves one call.

    Rows walk in groups: each row is a group of its own, unless the chooser wants them all to move
    together. A group's walk ends where one of its rows has no child for its token.
    """

    chooser: Chooser
    transcript: Transcript

    @property
    def pad_token_id(self) -> int:
        """What rows that stopped are filled up with."""
        return self.transcript.pad_token_id

    @property
    def moves_together(self) -> bool:
        """Do all rows get each token at once?"""
        return self.chooser.moves_together

    @property
    def all_done(self) -> bool:
        """Has every row stopped?"""
        return self.transcript.all_done

    def is_done(self, row: int) -> bool:
        """Has a row stopped?"""
        return self.transcript.done[row]

    def is_padded(self, row: int) -> bool:
        """Does a row get nothing but pads from now on?"""
        return self.transcript.is_padded(row)

    def max_depth(self, row: int) -> int:
        """How many drafts can still be committed to a row."""
        return self.transcript.max_depth(row)

    def noise_ahead(self, row: int) -> NoiseAhead | None:
        """The noise that a row's next tokens will be drawn with; None where it is not known."""
        return self.chooser.noise_ahead(row, self.transcript)

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
    ) -> list[StepRecord]:
        committed: list[list[int]] = []  # One list of a token a row for each level of the walk.

        def commit(nodes: Sequence[int]) -> tuple[list[int], bool]:
            visits = [Visit(rows[i], i, node) for i, node in zip(group, nodes, strict=True)]
            tokens, stops = self.chooser.commit(visits, self.transcript)
            committed.append(tokens)
            return tokens, stops

        paths = walk([trees[index] for index in group], commit)
        return [  # A generator would turn a streamer's StopIteration into a RuntimeError.
            StepRecord(row=rows[index], tree=trees[index], path=path, committed_ids=[*ids])
            for index, path, ids in zip(group, paths, zip(*committed, strict=True), strict=True)
        ]


class RowVerifiers:
    """The verifiers of rows that come and go, each of which is a call of its own.

    Each row has its own rules, its own text and its own random numbers. So what a row says does
    not depend on the rows beside it.
    """

    moves_together = False
    pad_token_id = 0

    def __init__(self) -> None:
        self._of_row: dict[int, Verifier] = {}
        self._logits = torch.empty(0)

    def add(self, row: int, verifier: Verifier) -> None:
        """Takes in a row; the verifier knows it as its only one."""
        self._of_row[row] = verifier

    def remove(self, row: int) -> Verifier:
        """Gives back the verifier of a row, with what was committed to it."""
        return self._of_row.pop(row)

    @property
    def all_done(self) -> bool:
        """Has every row stopped?"""
        return all(verifier.all_done for verifier in self._of_row.values())

    def stop(self, row: int) -> None:
        """Ends a row where it stands, since nobody reads it any more."""
        self._of_row[row].transcript.done[0] = True

    def is_done(self, row: int) -> bool:
        """Has a row stopped?"""
        return self._of_row[row].is_done(0)

    def is_padded(self, row: int) -> bool:
        """False: no row waits for the others."""
        return False

    def max_depth(self, row: int) -> int:
        """How many drafts can still be committed to a row."""
        return self._of_row[row].max_depth(0)

    def noise_ahead(self, row: int) -> NoiseAhead | None:
        """The noise that a row's next tokens will be drawn with; None where it is not known."""
        return self._of_row[row].noise_ahead(0)

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step."""
        self._logits = logits

    def verify(self, rows: Sequence[int], trees: Sequence[DraftTree]) -> list[StepRecord]:
        """What came of each tree, by the logits that were read; `rows` are the rows they are of."""
        records = []
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            verifier = self._of_row[row]
            verifier.read(self._logits[index : index + 1])
            (record,) = verifier.verify([0], [tree])
            record.row = row
            records.append(record)
        return records
