"""The loop: draft, lay out, forward, verify, commit, learn, for a batch of rows.

Everything outside is a callable or a protocol: the forward, the logits processors, the stopping
criteria. So a scripted model can drive it, and no word of transformers is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch

from selfspec.config import SpecConfig
from selfspec.cost import Budget, FixedBudget
from selfspec.draft.memory import Memory
from selfspec.machine.device import CpuDevice, Device, Fetched
from selfspec.records import DraftTree, Queries, StepRecord, TopK
from selfspec.run.backend import Backend
from selfspec.stats import GenerationStats
from selfspec.verify.logits import as_read, fits_at_once, top_k
from selfspec.verify.transcript import Transcript
from selfspec.verify.verifier import Lockstep, OwnPace, Row

__all__ = ["Decoder", "top_k_of"]

Listener = Callable[[StepRecord], None]


@dataclass
class Decoder:
    """Decodes a batch to its end. One instance serves one call."""

    backend: Backend
    pace: OwnPace | Lockstep
    transcript: Transcript
    memory: Memory
    config: SpecConfig
    stats: GenerationStats
    budget: Budget = field(default_factory=FixedBudget)
    device: Device = field(default_factory=CpuDevice)
    listeners: Sequence[Listener] = ()

    def start(self, rows: list[Row], prompt_logits: torch.Tensor) -> None:
        """Commits the tokens that the prompt's forward yields, from its last logits (B, V)."""
        self._rows = rows
        self._lap = perf_counter()
        trees = [DraftTree.of_root(row.last_token) for row in rows]
        records, tops, _ = self._verify(trees, prompt_logits[:, None])
        self.stats.num_new_tokens += len(records)
        self.stats.num_prompt_tokens_out += len(records)
        self.device.join()
        self._learn(records, tops)
        self._time("learn")
        self._tell(records)

    def run(self) -> None:
        """Steps until every row has stopped."""
        while not self.transcript.all_done:
            self._drop_done_rows()
            self.step()

    def step(self) -> None:
        """One forward and all that belongs to it."""
        self._lap = perf_counter()
        max_nodes = self.backend.max_width(self.budget.max_nodes(self.config.max_nodes))
        trees = self.pace.draft(self._rows, max_nodes, self.transcript, self.budget)
        queries = self._with_branches(trees)
        self._time("draft")
        layout = self.backend.lay_out(queries)
        self._time("layout")
        logits = self.backend.forward(layout)
        seconds = self._time("forward")
        records, tops, verify_seconds = self._verify(trees, logits)
        if logits.is_cuda:  # there the forward is waited for where its outcome is first read
            seconds += verify_seconds
        width = max(len(asked.tokens) for asked in queries)
        self._commit(records)
        self._learn(records, tops)
        self.budget.observe(width, seconds, records)
        for record in records:
            self.stats.count_step(record)
        self._time("learn")
        self._tell(records)

    def _with_branches(self, trees: list[DraftTree]) -> Sequence[DraftTree | Queries]:
        """The trees, and what branches ask beside them where the budget lets them."""
        width = max(map(len, trees))
        num_queries = max(row.num_branch_queries(self.transcript) for row in self._rows)
        if not self.budget.rides(width, num_queries):
            return trees
        return [row.queries(t, self.transcript) for row, t in zip(self._rows, trees, strict=True)]

    def _verify(
        self, trees: list[DraftTree], logits: torch.Tensor
    ) -> tuple[list[StepRecord], Fetched | None, float]:
        """The walks, the tables on their way, and the seconds.

        The device is asked for what the walk needs first, and for the tables beside it.
        """
        if fits_at_once(logits):
            logits = as_read(logits)
        self.pace.read(logits)
        seconds = self._time("verify")
        tops = self._fetch_tops(logits)
        seconds += self._time("learn")
        records = self.pace.verify(self._rows, trees, logits, self.transcript)
        return records, tops, seconds + self._time("verify")

    def _fetch_tops(self, logits: torch.Tensor) -> Fetched | None:
        if not self.memory.learns:
            return None
        with self.device.side(logits):
            return self.device.fetch(*top_k(logits, self.memory.top_k))

    def _commit(self, records: list[StepRecord]) -> None:
        """Moves the KV beside what the CPU does until the next forward, which waits for it."""
        with self.device.side():
            self.backend.commit([record.path for record in records])
        self.device.join()
        self._time("commit")

    def _learn(self, records: list[StepRecord], fetched: Fetched | None) -> None:
        if fetched is not None:
            tops = _tables(*fetched.get())
            for place, (row, record) in enumerate(zip(self._rows, records, strict=True)):
                record.top = tops.at((place, slice(len(record.tree))))
                row.take_branches(record, tops, place, self.memory)
                self.memory.calibration.observe(record)
        for row, record in zip(self._rows, records, strict=True):
            row.observe(record)

    def _drop_done_rows(self) -> None:
        if not self.pace.drops_rows:
            return
        live = [i for i, row in enumerate(self._rows) if not self.transcript.done[row.index]]
        if len(live) < len(self._rows):
            self._rows = [self._rows[i] for i in live]
            self.backend.keep_rows(live)

    def _tell(self, records: list[StepRecord]) -> None:
        for listener in self.listeners:
            for record in records:
                listener(record)

    def _time(self, stage: str) -> float:
        """Adds the time since the last stage to this one, and returns it."""
        now = perf_counter()
        seconds = now - self._lap
        self.stats.seconds[stage] += seconds  # type: ignore[assignment]
        self._lap = now
        return seconds


def top_k_of(logits: torch.Tensor, k: int) -> TopK:
    """The K likeliest tokens at each place of `logits` (..., V), with their probabilities."""
    ids, probabilities = top_k(logits, k)
    return _tables(ids.cpu(), probabilities.cpu())


def _tables(ids: torch.Tensor, probabilities: torch.Tensor) -> TopK:
    known = np.fmax(probabilities.numpy(), 0)  # where the model says NaN, stock goes on: so must we
    return TopK(ids.numpy().astype(np.int32), known.astype(np.float16))
