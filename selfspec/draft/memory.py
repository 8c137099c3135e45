"""What is learned, and how much of it one call may see and change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.calibration import Calibration
from selfspec.draft.shape import Shape
from selfspec.draft.sources import Source
from selfspec.errors import one_line
from selfspec.records import StepRecord, TopK

_log = logging.getLogger("selfspec")


@dataclass
class DraftMemory:
    """All that is learned: the sources, and how far each kind of evidence can be trusted."""

    sources: list[Source]
    calibration: Calibration
    top_k: int  # Sources see this many of each node's likeliest next tokens.
    learns: bool = True
    shape: Shape = field(default_factory=Shape)  # The shape of its rows' trees.
    failed: set[str] = field(default_factory=set)  # Sources whose failure was warned of.

    @property
    def nbytes(self) -> int:
        """The bytes of all sources that a cache can keep."""
        return sum(source.nbytes for source in self.sources)

    def for_request(self, learning: str) -> DraftMemory:
        """The memory for one call: the learning scope says whether it is a copy, and learns."""
        if learning == "request":
            copies = [source.copy() for source in self.sources]
            return replace(self, sources=copies, calibration=self.calibration.copy(), learns=True)
        return replace(self, learns=learning == "session")

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """The arrays of every source that a cache can keep."""
        tables = {source.name: source.arrays() for source in self.sources}
        return {name: arrays for name, arrays in tables.items() if arrays}

    def observe_steps(self, records: Sequence[StepRecord]) -> None:
        """Lets every source learn from steps of several rows, by one write to each table.

        The accepted nodes of a tree come last: they win over others.
        """
        pairs, ids, probabilities = list[tuple[int, int]](), [], []
        for record in records:
            if record.top is None:
                continue
            tree, path = record.tree, set(record.path)
            order = sorted(range(len(tree)), key=path.__contains__)
            tokens = [*tree.tokens, record.above]  # The root's parent, -1, is the last one.
            pairs += [(tokens[tree.parents[node]], tokens[node]) for node in order]
            ids.append(record.top.ids[order])
            probabilities.append(record.top.probabilities[order])
        if pairs:
            top = TopK(np.concatenate(ids), np.concatenate(probabilities))
            self.observe_pairs(np.array(pairs, np.int64), top)

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Lets every source learn what the model predicted after some tokens.

        `pairs` (N, 2) are the last two tokens before each of the N answers; where there is only
        one, the other is -1.
        """
        for source in self.sources:
            try:
                source.observe_pairs(pairs, top)
            except Exception as error:
                self.say_failed(source.name, error, "has not learned from some tokens")

    def say_failed(
        self, name: str, error: Exception, what: str = "drafts nothing more in this text"
    ) -> None:
        """Warns of a source once, however many texts it fails in."""
        level = logging.DEBUG if name in self.failed else logging.WARNING
        self.failed.add(name)
        text = "the source %r has failed, and %s: %s"
        _log.log(level, text, name, what, one_line(error), exc_info=error)
