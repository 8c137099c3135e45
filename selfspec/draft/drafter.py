"""`Drafter`: what one row drafts from, step after step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from selfspec.config import SpecConfig
from selfspec.draft.memory import DraftMemory
from selfspec.draft.ranking import Ranking
from selfspec.draft.sources import Cursor, RowStart, Source
from selfspec.draft.tree import TreeGrower
from selfspec.records import DraftTree, Pays, StepRecord


class Drafter:
    """A cursor of each source, and the trees that grow from them.

    Cursors are opened once the row has its first token: nobody waits for them, and a grammar's
    processors know their grammar by then. A source that fails is asked nothing more: it costs
    drafts, and no text.
    """

    def __init__(
        self,
        learned: DraftMemory,
        start: RowStart,  # Its `learns` is replaced by that of `learned`.
        config: SpecConfig,
        sources: Sequence[Source] = (),  # beside what is learned: the call's own and the model's
        *,
        num_readable: int = sys.maxsize,  # ids, of which alone drafts are made
        banned: int | None = None,  # A token after which no draft can be verified.
    ) -> None:
        start = replace(start, learns=learned.learns)
        self.learned = learned
        self._unopened = [(source, start) for source in (*learned.sources, *sources)]
        self._cursors: list[Cursor] = []
        self._names: list[str] = []  # The cursors' sources.
        self._shape = learned.shape.for_row(start.prompt_ids, learns=learned.learns)
        calibration = learned.calibration
        ranking = Ranking(
            calibration.probability, num_readable, banned, start.draws, calibration.grid
        )
        self._grower = TreeGrower(self._cursors, config, ranking, self._shape.grow)

    @property
    def cursors(self) -> list[Cursor]:
        """The cursors that have not failed; they are opened when this is first asked."""
        unopened, self._unopened = self._unopened, []
        for source, start in unopened:
            try:
                cursor = source.open(start)
            except Exception as error:
                self.learned.say_failed(source.name, error)
                continue
            if cursor is not None:
                self._cursors.append(cursor)
                self._names.append(source.name)
        return self._cursors

    def prepare(self) -> None:
        """Lets cursors that take time begin, before each step."""
        self._ask_all(lambda cursor: cursor.prepare())

    def draft(
        self, root_token: int, max_nodes: int, max_depth: int, pays: Pays | None = None
    ) -> DraftTree:
        """The tree of the next step, below the last token of the text."""
        grower = self._grower
        try:
            return grower.grow(root_token, max_nodes, max_depth, pays)
        except Exception as error:
            if grower.current is None:
                raise
            self._drop(grower.current, error)
        return DraftTree.of_root(root_token)

    @property
    def wants_states(self) -> bool:
        """Is any cursor to see the hidden states of the next step?"""
        return any(self._ask_all(lambda cursor: cursor.wants_states))

    def observe(self, record: StepRecord) -> None:
        """Moves every cursor past the committed tokens. The engine teaches what rows share."""
        self._shape.observe(record)
        self._ask_all(lambda cursor: cursor.observe(record))

    def _ask_all(self, question: Callable[[Cursor], Any]) -> list[Any]:
        """The answers of all cursors but those that fail."""
        answers = []
        for cursor in tuple(self.cursors):
            try:
                answers.append(question(cursor))
            except Exception as error:
                self._drop(cursor, error)
        return answers

    def _drop(self, cursor: Cursor, error: Exception) -> None:
        index = self._cursors.index(cursor)
        del self._cursors[index]
        self.learned.say_failed(self._names.pop(index), error)
