"""The loop: draft, lay out, forward, verify, commit, learn, for a batch of rows.

Everything outside is a callable or a protocol: the forward, the logits processors, the stopping
criteria. So a scripted model can drive it, and no word of transformers is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from selfspec.config import SpecConfig
from selfspec.cost import Budget, FixedBudget, Step, StepTime
from selfspec.draft.memory import Memory
from selfspec.errors import ConfigError
from selfspec.machine.device import Device, Fetched, PlainDevice
from selfspec.records import DraftTree, StepRecord, TopK
from selfspec.run.backend import Backend
from selfspec.sequence import Sequence
from selfspec.verify.choosers import Said
from selfspec.verify.logits import as_read, fits_at_once, top_k
from selfspec.verify.walk import walk

__all__ = ["Decoder", "FirstTokens", "first_tokens", "top_k_of"]

Listener = Callable[[StepRecord], None]
Asked = ParamSpec("Asked")
Given = TypeVar("Given")


class FirstTokens(NamedTuple):
    """What the prompt's forward committed to each row."""

    records: list[StepRecord]
    logits: torch.Tensor  # (B, 1, V): those that the tokens were chosen from


@dataclass
class Decoder:
    """Decodes a batch to its end, or a step at a time while rows come and go.

    Rows that move together are all of the batch, and none of them leaves before the last.
    """

    backend: Backend
    config: SpecConfig
    rows: list[Sequence] = field(default_factory=list)  # Those that still decode, in their order.
    budget: Budget = field(default_factory=FixedBudget)
    device: Device = field(default_factory=PlainDevice)
    listeners: Collection[Listener] = ()
    num_readable: int | None = None  # Ids that the model can't read are not worth learning.
    before_step: Callable[[int], None] | None = None  # Told the rows; may change how they are run.
    clock: Callable[[], float] = perf_counter

    def add(self, rows: list[Sequence], first: FirstTokens) -> None:
        """Takes in rows that have their first token, and learns from it.

        A backend to which rows are added one by one must have them already.
        """
        self._start()
        self.rows += rows
        tops = self._fetch_tops(first.logits, rows[0].memory)
        self.device.join()
        self._timed("learn", self._learn, rows, first.records, tops)
        for row in rows:
            row.stats.count_first(self._laps, len(rows))
        self._tell(first.records)

    def run(self) -> None:
        """Steps until every row has stopped."""
        rows = self.rows
        while not all(row.is_done for row in self.rows):
            self.drop_done_rows()
            self.step()
        for row in rows:
            row.stats.paused = self.budget.paused

    def step(self) -> list[StepRecord]:
        """One forward and all that belongs to it; returns what came of each row."""
        start = self._start()
        rows, timed = self.rows, self._timed
        if self.before_step is not None:
            timed("prepare", self.before_step, len(rows))
            start = self._lap
        pending, allowed = self.backend.num_pending, self.backend.max_width(self.config.max_nodes)
        step = self.budget.step(allowed, pending)
        trees = timed("draft", self._draft, step)
        drafted = self._lap
        layout = timed("layout", self.backend.lay_out, trees)
        logits = timed("forward", self.backend.forward, layout)
        # The device is asked for what the walk needs first, and for the tables beside it.
        logits = timed("verify", _read, rows, logits, self.device)
        tops = timed("learn", self._fetch_tops, logits, rows[0].memory)
        records = timed("verify", _verified, rows, trees)
        timed("commit", self._commit, records)
        timed("learn", self._learn, rows, records, tops)
        width = (pending or 0) + max(map(len, trees))
        rest = self._lap - drafted - self.backend.setting_up
        timed("learn", step.observe, StepTime(width, drafted - start, rest), records)
        for row, record in zip(rows, records, strict=True):
            row.stats.count_step(record)
            row.stats.num_read_again += pending or 0
            row.stats.count_time(self._laps, self._lap - start, width, len(rows))
        self._tell(records)
        return records

    def drop_done_rows(self) -> list[Sequence]:
        """Rows that walk alone leave the batch when they stop; those that move together stay.

        Returns the rows that left. The last rows move into their places, so that few are moved.
        """
        done = [row.is_done and not row.chooser.moves_together for row in self.rows]
        if not any(done):
            return []
        left = [row for row, has_left in zip(self.rows, done, strict=True) if has_left]
        live = _without_gaps(done)
        self.rows = [self.rows[i] for i in live]
        self.backend.keep_rows(live)
        return left

    def _draft(self, step: Step) -> list[DraftTree]:
        """A tree for each row, with what its shape hangs beside it.

        A tree is no deeper than the row's text may still grow. A row that only waits for the others
        gets the pads that are sure to come.
        """
        trees = []
        for row in self.rows:
            limits = (1 if row.is_padded else step.max_nodes, row.max_depth, step.search())
            noise = row.chooser.noise_ahead(row)
            trees.append(row.grower.grow(row.last_token, *limits, noise))
        step.fit(trees)
        for row, tree in zip(self.rows, trees, strict=True):
            if row.shape.num_beside and self.config.top_k > 1:  # Else the model takes chains only.
                widest = self.backend.max_width(len(tree) + row.shape.num_beside)
                _hang(row, tree, min(step.room_beside(len(tree)), widest - len(tree)))
        _add_pads(self.rows, trees)
        return trees

    def _fetch_tops(self, logits: torch.Tensor, memory: Memory) -> Fetched | None:
        """The tables to learn from; all rows learn alike, so any row's memory will do."""
        if not memory.learns:
            return None
        with self.device.side(logits):
            return self.device.fetch(*top_k(logits[..., : self.num_readable], memory.top_k))

    def _commit(self, records: list[StepRecord]) -> None:
        """Moves the KV beside what the CPU does until the next forward, which waits for it."""
        with self.device.side():
            self.backend.commit([record.path for record in records])
        self.device.join()

    def _learn(
        self, rows: list[Sequence], records: list[StepRecord], fetched: Fetched | None
    ) -> None:
        if fetched is not None:
            tops = _tables(*fetched.get())
            for index, record in enumerate(records):
                record.top = tops.at((index, slice(len(record.tree))))
        for row, record in zip(rows, records, strict=True):
            row.observe(record)

    def _tell(self, records: list[StepRecord]) -> None:
        for listener in self.listeners:
            for record in records:
                listener(record)

    def _start(self) -> float:
        """Begins to time the verbs of a step."""
        self._laps: dict[str, float] = {}
        self._lap = self.clock()
        return self._lap

    def _timed(
        self,
        stage: str,
        verb: Callable[Asked, Given],
        *args: Asked.args,
        **kwargs: Asked.kwargs,
    ) -> Given:
        """What `verb` gives; the time since the verb before it is added to a stage."""
        given = verb(*args, **kwargs)
        now = self.clock()
        self._laps[stage] = self._laps.get(stage, 0.0) + now - self._lap
        self._lap = now
        return given


def first_tokens(rows: list[Sequence], prompt_logits: torch.Tensor, device: Device) -> FirstTokens:
    """Commits what the prompt's forward yields to each row, by its last logits (B, V).

    This needs neither tables nor slots for drafts, so that a streamer has the first token before
    any of them is made.
    """
    trees = [DraftTree.of_root(row.last_token) for row in rows]
    logits = _read(rows, prompt_logits[:, None], device)
    return FirstTokens(_verified(rows, trees), logits)


def top_k_of(logits: torch.Tensor, k: int) -> TopK:
    """The K likeliest next tokens that `logits` (..., V) tell, with their probabilities."""
    ids, probabilities = top_k(logits, k)
    return _tables(ids.cpu(), probabilities.cpu())


def _read(rows: list[Sequence], logits: torch.Tensor, device: Device) -> torch.Tensor:
    """Asks the device for what the walks need; returns the logits that tables are made of."""
    if fits_at_once(logits):
        logits = as_read(logits)
    said = Said(logits, device)
    for index, row in enumerate(rows):
        row.chooser.read(said, index)
    return logits


def _verified(rows: list[Sequence], trees: list[DraftTree]) -> list[StepRecord]:
    """What came of each tree, by the logits that were read.

    Each row walks down its tree by itself, unless all move together. Then the walk ends where one
    of them has no child for its token.
    """
    pairs = list(zip(rows, trees, strict=True))
    groups = [pairs] if rows[0].chooser.moves_together else [[pair] for pair in pairs]
    return [record for group in groups for record in _walked(group)]


def _walked(group: list[tuple[Sequence, DraftTree]]) -> list[StepRecord]:
    rows, starts = [row for row, _ in group], [row.num_new for row, _ in group]
    paths = walk([tree for _, tree in group], partial(rows[0].chooser.commit, rows))
    return [
        StepRecord(row=row.index, tree=tree, path=path, committed_ids=row.new_ids[start:])
        for (row, tree), path, start in zip(group, paths, starts, strict=True)
    ]


def _hang(row: Sequence, tree: DraftTree, room: int) -> None:
    """Lets a row's shape add nodes beside its tree, where there are slots and positions for them.

    What stands beyond the end of a text, or in one that has stopped, is not asked.
    """
    num_before = len(tree)
    depth = 0 if row.is_done else row.max_depth
    row.shape.hang(tree, depth, room)
    deepest = max(tree.depths[num_before:], default=0)
    if len(tree) - num_before > room or deepest > depth:
        raise ConfigError(
            f"{type(row.shape).__name__}.hang() must add at most {room} nodes, at most {depth} "
            f"tokens deep (got {len(tree) - num_before}, {deepest} deep); mind room and max_depth"
        )


def _add_pads(rows: list[Sequence], trees: list[DraftTree]) -> None:
    """Makes the trees of rows that are padded chains of pads, as deep as the deepest of all."""
    padded = [(row, tree) for row, tree in zip(rows, trees, strict=True) if row.is_padded]
    deepest = max(max(tree.depths) for tree in trees) if padded else 0
    for row, tree in padded:
        for node in range(deepest):
            tree.add(node, row.pad_token_id, 1.0)


def _without_gaps(gaps: list[bool]) -> list[int]:
    """The indices that are no gaps, the last ones moved into the gaps.

    >>> _without_gaps([False, True, False, False])
    [0, 3, 2]
    """
    kept = [index for index, is_gap in enumerate(gaps) if not is_gap]
    behind = [index for index in kept if index >= len(kept)]
    return [behind.pop() if gaps[index] else index for index in range(len(kept))]


def _tables(ids: torch.Tensor, probabilities: torch.Tensor) -> TopK:
    known = np.fmax(probabilities.numpy(), 0)  # Stock goes on where the model says NaN.
    return TopK(ids.numpy().astype(np.int32), known.astype(np.float16))
