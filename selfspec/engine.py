"""The loop: draft, lay out, forward, verify, commit, learn, for a batch of rows.

Everything outside is a callable or a protocol: the forward, the logits processors, the stopping
criteria. So a scripted model can drive it, and no word of transformers is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from selfspec.config import SpecConfig
from selfspec.cost import Budget, FixedBudget, Step, Took
from selfspec.draft.memory import Memory
from selfspec.draft.row import Row
from selfspec.machine.device import CpuDevice, Device, Fetched
from selfspec.records import DraftTree, StepRecord, TopK
from selfspec.run.backend import Backend
from selfspec.stats import GenerationStats
from selfspec.verify.logits import as_read, fits_at_once, top_k
from selfspec.verify.verifier import RowText, Verifier

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
    """Decodes a batch to its end, or a step at a time while rows come and go."""

    backend: Backend
    verifier: Verifier
    config: SpecConfig
    stats: GenerationStats
    rows: list[Row] = field(default_factory=list)  # Those that still decode, in their order.
    budget: Budget = field(default_factory=FixedBudget)
    device: Device = field(default_factory=CpuDevice)
    listeners: Sequence[Listener] = ()
    num_readable: int | None = None  # Ids that the model can't read are not worth learning.
    before_step: Callable[[int], None] | None = None  # Told the rows; may change how they are run.
    clock: Callable[[], float] = perf_counter

    def add(self, rows: Sequence[Row], first: FirstTokens) -> None:
        """Takes in rows that have their first token, and learns from it.

        A backend to which rows are added one by one must have them already.
        """
        self._lap = self.clock()
        self.rows += rows
        tops = self._fetch_tops(first.logits, rows[0].memory)
        self.stats.num_new_tokens += len(first.records)
        self.stats.num_prompt_tokens_out += len(first.records)
        self.device.join()
        self._timed("learn", self._learn, rows, first.records, tops)
        self._tell(first.records)

    def run(self) -> None:
        """Steps until every row has stopped."""
        while not self.verifier.all_done:
            self.drop_done_rows()
            self.step()
        self.stats.paused = self.budget.paused

    def step(self) -> list[StepRecord]:
        """One forward and all that belongs to it; returns what came of each row."""
        self._lap = self.clock()
        rows, timed = self.rows, self._timed
        if self.before_step is not None:
            timed("prepare", self.before_step, len(rows))
        start = self._lap
        step = self.budget.step(self.backend.max_width(self.config.max_nodes))
        trees = timed("draft", self._draft, step)
        drafted = self._lap
        layout = timed("layout", self.backend.lay_out, trees)
        logits = timed("forward", self.backend.forward, layout)
        # The device is asked for what the walk needs first, and for the tables beside it.
        indices = [row.index for row in rows]
        logits = timed("verify", _read, self.verifier, indices, logits)
        tops = timed("learn", self._fetch_tops, logits, rows[0].memory)
        records = timed("verify", self.verifier.verify, indices, trees)
        timed("commit", self._commit, records)
        timed("learn", self._learn, rows, records, tops)
        timed("learn", self._count, records)
        width = max(map(len, trees))
        rest = self._lap - drafted - self.backend.setting_up
        timed("learn", step.observe, Took(width, drafted - start, rest), records)
        self.stats.count_time(width, len(records), self._lap - start)
        self._tell(records)
        return records

    def drop_done_rows(self) -> list[Row]:
        """Rows that walk alone leave the batch when they stop; those that move together stay.

        Returns the rows that left. The last rows move into their places, so that few are moved.
        """
        if self.verifier.moves_together:
            return []
        done = [self.verifier.texts[row.index].is_done for row in self.rows]
        if not any(done):
            return []
        left = [row for row, has_left in zip(self.rows, done, strict=True) if has_left]
        live = _without_gaps(done)
        self.rows = [self.rows[i] for i in live]
        self.backend.keep_rows(live)
        return left

    def _draft(self, step: Step) -> list[DraftTree]:
        """A tree for each row, with the row's branches.

        A tree is no deeper than the row's text may still grow. A row that only waits for the others
        gets the pads that are sure to come.
        """
        texts = [self.verifier.texts[row.index] for row in self.rows]
        trees = []
        for row, text in zip(self.rows, texts, strict=True):
            limits = (1 if text.is_padded else step.max_nodes, text.max_depth, step.search())
            trees.append(row.grower.grow(row.last_token, *limits, text.noise_ahead))
        step.fit(trees)
        for row, text, tree in zip(self.rows, texts, trees, strict=True):
            # What stands beyond the end of a text, or in one that has stopped, is not worth asking.
            depth = 0 if text.is_done else text.max_depth
            row.branches.hang(tree, depth, step.room_beside(len(tree)))
        _add_pads(trees, texts)
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
        self, rows: Sequence[Row], records: list[StepRecord], fetched: Fetched | None
    ) -> None:
        if fetched is not None:
            tops = _tables(*fetched.get())
            for index, (row, record) in enumerate(zip(rows, records, strict=True)):
                record.top = tops.at((index, slice(len(record.tree))))
                row.memory.calibration.observe(record)
        for row, record in zip(rows, records, strict=True):
            row.observe(record)

    def _count(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.stats.count_step(record)

    def _tell(self, records: list[StepRecord]) -> None:
        for listener in self.listeners:
            for record in records:
                listener(record)

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
        self.stats.seconds[stage] += now - self._lap  # type: ignore[assignment]
        self._lap = now
        return given


def first_tokens(
    verifier: Verifier,
    rows: Sequence[int],
    last_tokens: Sequence[int],
    prompt_logits: torch.Tensor,
) -> FirstTokens:
    """Commits what the prompt's forward yields to each row, by its last logits (B, V).

    This needs neither tables nor slots for drafts, so that a streamer has the first token before
    any of them is made. `last_tokens` are the ends of the prompts.
    """
    logits = _read(verifier, rows, prompt_logits[:, None])
    trees = [DraftTree.of_root(token) for token in last_tokens]
    return FirstTokens(verifier.verify(rows, trees), logits)


def top_k_of(logits: torch.Tensor, k: int) -> TopK:
    """The K likeliest next tokens that `logits` (..., V) tell, with their probabilities."""
    ids, probabilities = top_k(logits, k)
    return _tables(ids.cpu(), probabilities.cpu())


def _read(verifier: Verifier, rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Asks the device for what the walks need; returns the logits that tables are made of."""
    if fits_at_once(logits):
        logits = as_read(logits)
    verifier.read(rows, logits)
    return logits


def _add_pads(trees: Sequence[DraftTree], texts: Sequence[RowText]) -> None:
    """Makes the trees of rows that are padded chains of pads, as deep as the deepest of all."""
    padded = [(tree, text) for tree, text in zip(trees, texts, strict=True) if text.is_padded]
    deepest = max(max(tree.depths) for tree in trees) if padded else 0
    for tree, text in padded:
        for node in range(deepest):
            tree.add(node, text.transcript.pad_token_id, 1.0)


def _without_gaps(gaps: Sequence[bool]) -> list[int]:
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
