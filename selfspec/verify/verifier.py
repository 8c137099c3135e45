"""Walks down the trees of a batch and commits what the model says on the way.

The rows of a batch are those of one call, whether they walk alone or move together, or rows of many
calls that come and go. Knows neither where trees come from, nor what becomes of the KV.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from selfspec.records import DraftTree, NoiseAhead, StepRecord
from selfspec.verify.choosers import Chooser, Visit
from selfspec.verify.transcript import Transcript
from selfspec.verify.walk import walk

__all__ = ["RowText", "Verifier", "row_texts"]


@dataclass(frozen=True, slots=True)
class RowText:
    """The text of one row, and what chooses its next token; the rows of a call share both."""

    chooser: Chooser
    transcript: Transcript
    number: int = 0  # of the row, in both

    @property
    def is_done(self) -> bool:
        """Has the row stopped?"""
        return self.transcript.done[self.number]

    @property
    def is_padded(self) -> bool:
        """Does the row get nothing but pads from now on?"""
        return self.transcript.is_padded(self.number)

    @property
    def max_depth(self) -> int:
        """How many drafts can still be committed."""
        return self.transcript.max_depth(self.number)

    @property
    def noise_ahead(self) -> NoiseAhead | None:
        """The noise that the next tokens will be drawn with; None where it is not known."""
        return self.chooser.noise_ahead(self.number, self.transcript)

    def stop(self) -> None:
        """Ends the row where it stands, since nobody reads it any more."""
        self.transcript.done[self.number] = True


def row_texts(chooser: Chooser, transcript: Transcript) -> dict[int, RowText]:
    """The rows of one call, by their index."""
    return {row: RowText(chooser, transcript, row) for row in range(len(transcript.done))}


@dataclass
class Verifier:
    """Turns trees and logits into committed tokens; `texts` are the rows, by what names them.

    Rows walk in groups: each row is a group of its own, unless the chooser wants them all to move
    together. A group's walk ends where one of its rows has no child for its token. What a row of
    another call says does not depend on the rows beside it.
    """

    texts: dict[int, RowText] = field(default_factory=dict)

    @property
    def moves_together(self) -> bool:
        """Do all rows get each token at once? Then none may leave before the others."""
        return any(text.chooser.moves_together for text in self.texts.values())

    @property
    def all_done(self) -> bool:
        """Has every row stopped?"""
        return all(text.is_done for text in self.texts.values())

    def read(self, rows: Sequence[int], logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step, and asks the device for what the walks need."""
        texts = [self.texts[row] for row in rows]
        self._indices = list(range(len(rows)))  # Where each row's logits are for its chooser.
        if all(text.chooser is texts[0].chooser for text in texts):
            texts[0].chooser.read(logits)
            return
        for index, text in enumerate(texts):
            text.chooser.read(logits[index : index + 1])
            self._indices[index] = 0

    def verify(self, rows: Sequence[int], trees: Sequence[DraftTree]) -> list[StepRecord]:
        """What came of each tree, by the logits that were read; `rows` are the rows they are of."""
        indices = range(len(rows))
        groups = [indices] if self.moves_together else [[index] for index in indices]
        records = [record for group in groups for record in self._verify(group, rows, trees)]
        self._forget([self.texts[row] for row in rows])
        return records

    def _verify(
        self, group: Sequence[int], rows: Sequence[int], trees: Sequence[DraftTree]
    ) -> list[StepRecord]:
        texts = [self.texts[rows[index]] for index in group]
        places = [(text.number, self._indices[i]) for text, i in zip(texts, group, strict=True)]
        committed: list[list[int]] = []  # One list of a token a row for each level of the walk.

        def commit(nodes: Sequence[int]) -> tuple[list[int], bool]:
            visits = [Visit(*place, node) for place, node in zip(places, nodes, strict=True)]
            tokens, stops = texts[0].chooser.commit(visits, texts[0].transcript)
            committed.append(tokens)
            return tokens, stops

        paths = walk([trees[index] for index in group], commit)
        return [  # A generator would turn a streamer's StopIteration into a RuntimeError.
            StepRecord(row=rows[index], tree=trees[index], path=path, committed_ids=[*ids])
            for index, path, ids in zip(group, paths, zip(*committed, strict=True), strict=True)
        ]

    def _forget(self, texts: Sequence[RowText]) -> None:
        """Lets each chooser free what it kept for steps that all of its rows have behind them."""
        oldest: dict[int, float] = {}
        for text in texts:
            step = text.transcript.num_new(text.number)
            oldest[id(text.chooser)] = min(oldest.get(id(text.chooser), math.inf), step)
        for text in texts:
            text.chooser.forget_before(int(oldest[id(text.chooser)]))
