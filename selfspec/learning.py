"""What sources are shown of each step: what came of it, and the model's likeliest next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from selfspec.machine.device import Fetched
from selfspec.records import StepRecord, TopK
from selfspec.row import Row
from selfspec.verify.choosers import StepLogits
from selfspec.verify.logits import top_k

Committed: TypeAlias = tuple[Row, StepRecord]  # A row, and its step's record.


@dataclass(frozen=True, eq=False)
class StepOutputs:
    """The results of a forward over the trees of some rows."""

    logits: StepLogits
    tops: Fetched | None  # The likeliest tokens at each node, on their way to the CPU.
    states: torch.Tensor | None = None  # (B, Q, D)


def top_k_of(logits: torch.Tensor, k: int) -> TopK:
    """The K likeliest next tokens by `logits` (..., V), with their probabilities."""
    ids, probabilities = top_k(logits, k)
    return tables(ids.cpu(), probabilities.cpu())


def tables(ids: torch.Tensor, probabilities: torch.Tensor) -> TopK:
    """Likeliest tokens that were fetched from the device."""
    known = np.fmax(probabilities.numpy(), 0)  # transformers goes on where the model says NaN.
    return TopK(ids.numpy().astype(np.int32), known.astype(np.float16))


def learn(
    rows: Sequence[Row], records: Sequence[StepRecord | None], outputs: StepOutputs
) -> list[Committed]:
    """Shows each row's cursors what came of its tree, and then the sources what the model said.

    Waits for the tables, if anybody learns. Rows that share sources teach them by one write.
    Returns the rows that have not failed.
    """
    tops = None if outputs.tops is None else tables(*outputs.tops.get())
    committed: list[Committed] = []
    lessons: dict[int, list[Committed]] = {}  # For rows that share a calibration.
    for index, (row, record) in enumerate(zip(rows, records, strict=True)):
        if record is None:
            continue
        committed.append((row, record))
        learned = row.drafter.learned
        with row.guarded():
            if record.path:
                record.top = None if tops is None else tops.at((index, slice(len(record.tree))))
                record.states = None if outputs.states is None else outputs.states[index]
                row.drafter.observe(record)
            if learned.learns:
                learned.calibration.observe(record)
        if learned.learns:
            lessons.setdefault(id(learned.calibration), []).append((row, record))
    for shared in lessons.values():
        row, _ = shared[0]
        with row.guarded():
            row.drafter.learned.observe_steps([record for _, record in shared])
    return committed
