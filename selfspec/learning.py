"""What sources are shown of the model: its likeliest next tokens after the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from selfspec.draft.learned import Learned
from selfspec.forward.prompt import Prefilled, num_teaching
from selfspec.machine.device import Fetched
from selfspec.records import StepRecord, TopK
from selfspec.row import Row
from selfspec.verify.choosers import StepLogits
from selfspec.verify.logits import top_k

Committed: TypeAlias = tuple[Row, StepRecord]  # What came of a step of a row.

_CHUNK_ELEMENTS = 1 << 22  # At most this many logits are held at a time.


@dataclass(frozen=True, eq=False)
class Seen:
    """What a forward over the trees of some rows shows."""

    logits: StepLogits
    tops: Fetched | None  # The likeliest tokens at each node, on their way to the CPU.
    states: torch.Tensor | None = None  # (B, Q, D)


def top_k_of(logits: torch.Tensor, k: int) -> TopK:
    """The K likeliest next tokens by `logits` (..., V), with their probabilities."""
    ids, probabilities = top_k(logits, k)
    return tables(ids.cpu(), probabilities.cpu())


def tables(ids: torch.Tensor, probabilities: torch.Tensor) -> TopK:
    """Likeliest tokens that were fetched from the device."""
    known = np.fmax(probabilities.numpy(), 0)  # Stock goes on where the model says NaN.
    return TopK(ids.numpy().astype(np.int32), known.astype(np.float16))


def teach(learned: Learned, prompt: Prefilled, head: torch.nn.Module, num_readable: int) -> None:
    """Shows the sources the model's likeliest tokens after the last tokens of a prompt.

    Ids from `num_readable` on, which the model can't read, are left out. If two tokens in a row
    occur several times, only the last occurrence is shown, since the sources would keep no other.
    """
    hidden, visible, ids = prompt.hidden, prompt.visible, prompt.input_ids
    if hidden is None:
        return
    length = min(num_teaching(hidden), hidden.shape[1], ids.shape[1])
    if not length:
        return
    # A model such as Cohere or Granite scales what its head puts out.
    raw = head(hidden[:, -1]).float()
    scale = float((raw * prompt.logits.float()).sum() / (raw * raw).sum().clamp(min=1e-12))
    pairs = last_pairs(ids.cpu(), None if visible is None else visible.cpu(), length)
    hidden = hidden[:, -length:].reshape(-1, hidden.shape[-1])
    # Where each pair came last, without those that end in padding.
    last = {(above, token): i for i, (above, token) in enumerate(pairs.tolist()) if token >= 0}
    indices = torch.tensor(sorted(last.values()), dtype=torch.long, device="cpu")
    for part in torch.split(indices, max(_CHUNK_ELEMENTS // prompt.logits.shape[-1], 1)):
        logits = head(hidden[part.to(hidden.device)])[:, :num_readable] * scale
        learned.observe_pairs(pairs[part].numpy(), top_k_of(logits, learned.top_k))


def last_pairs(input_ids: torch.Tensor, visible: torch.Tensor | None, length: int) -> torch.Tensor:
    """(B * length, 2): the last two tokens at each of the last columns; -1 means none."""
    # Of a prompt that came as embeddings there are no ids before its first new token.
    ids = torch.nn.functional.pad(input_ids.long(), (2, 0), value=-1)
    if visible is not None:
        ids[:, 2:].masked_fill_(~visible[:, -input_ids.shape[1] :], -1)
    return torch.stack([ids[:, -length - 1 : -1], ids[:, -length:]], dim=-1).reshape(-1, 2)


def learn(rows: Sequence[Row], records: Sequence[StepRecord | None], seen: Seen) -> list[Committed]:
    """Shows each row's cursors what came of its tree, and then the sources what the model said.

    Waits for the tables, if anybody learns. Rows that share sources teach them by one write.
    Returns the rows that have not failed.
    """
    tops = None if seen.tops is None else tables(*seen.tops.get())
    committed: list[Committed] = []
    lessons: dict[int, list[Committed]] = {}  # Of the rows that share a calibration.
    for index, (row, record) in enumerate(zip(rows, records, strict=True)):
        if record is None:
            continue
        committed.append((row, record))
        learned = row.drafter.learned
        with row.guarded():
            if record.path:
                record.top = None if tops is None else tops.at((index, slice(len(record.tree))))
                record.states = None if seen.states is None else seen.states[index]
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
