"""Counts n-grams over documents, in runs on disk that a later start goes on from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from selfspec.building.grams import GramCounter
from selfspec.building.progress import Bar
from selfspec.building.recipe import Recipe
from selfspec.building.tokens import Ids
from selfspec.building.work_folder import WorkFolder
from selfspec.draft.sources.corpus import CorpusTables

STAGE = "counting"


class CountedShard(NamedTuple):
    """The n-grams of some documents that follow each other, as a `BuildWorker` counted them."""

    documents: int
    tokens: int
    empty: int  # Documents in which nothing was found.
    runs: list[bytes]  # Files as `GramCounter` writes them.


class Counting:
    """One build's n-gram counts: the runs on disk, and how many documents they cover.

    A killed process loses what it counted since the last run, at most what fits `max_memory`.
    """

    def __init__(
        self, work: WorkFolder, recipe: Recipe, *, vocab_size: int, max_memory: int
    ) -> None:
        self._work = work
        self._recipe = recipe
        self._amid_document = False
        known = work.progress.get(STAGE, {})
        self.documents: int = known.get("documents", 0)
        self.tokens: int = known.get("tokens", 0)
        self.empty: int = known.get("empty", 0)
        self.finished: bool = known.get("finished", False)
        folder: Path = work.part("runs")
        self._counter = GramCounter(
            folder,
            vocab_size=vocab_size,
            max_prefix=recipe.max_prefix,
            max_memory=max_memory,
            runs=known.get("runs", []),
        )
        self._num_runs = len(self._counter.runs)  # Those that the journal names.

    def run(self, documents: Iterable[Ids | None], bar: Bar) -> None:
        """Counts documents; the first `self.documents` of the data must have been skipped."""
        try:
            for ids in documents:
                self._add(ids)
                bar.advance(1, 0 if ids is None else len(ids))
                if self._counter.full or len(self._counter.runs) > self._num_runs:
                    self._close_run()
        except KeyboardInterrupt:
            if not self._amid_document:
                self._close_run()
            raise
        self.finished = True
        self._close_run()

    def merge(self, shards: Iterable[CountedShard], bar: Bar) -> None:
        """Takes what was counted elsewhere, in the order of the documents, in place of `run`."""
        for shard in shards:
            for run in shard.runs:
                self._counter.take_run(run)
            self.documents += shard.documents
            self.tokens += shard.tokens
            self.empty += shard.empty
            bar.advance(shard.documents, shard.tokens)
            self._close_run()
        self.finished = True
        self._close_run()

    def tables(self, bar: Bar) -> CorpusTables:
        """Merges all runs into the tables of a cache folder."""
        return self._counter.tables(
            min_count=self._recipe.min_count,
            max_continuations=self._recipe.max_continuations,
            max_bytes=self._recipe.max_bytes,
            progress=bar.show,
        )

    def _add(self, ids: Ids | None) -> None:
        self._amid_document = True
        if ids is not None:
            self._counter.add(ids)
            self.tokens += len(ids)
        self.documents += 1
        self.empty += ids is None
        self._amid_document = False

    def _close_run(self) -> None:
        self._counter.flush()
        progress = {
            "documents": self.documents,
            "tokens": self.tokens,
            "empty": self.empty,
            "finished": self.finished,
            "runs": list(self._counter.runs),
        }
        self._work.note(STAGE, progress)
        self._num_runs = len(self._counter.runs)
