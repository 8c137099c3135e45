"""What rows commit by the logits of a forward: each row walks down its tree.

Knows rows and trees; nothing of the model, of KV or of what is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from selfspec.machine.device import Device
from selfspec.records import DraftTree, StepRecord
from selfspec.row import Row
from selfspec.verify.choosers import StepLogits
from selfspec.verify.logits import fits_at_once, in_float32
from selfspec.verify.walk import walk

Drafted = tuple[Row, DraftTree]


class FirstTokens(NamedTuple):
    """What the prompt's forward committed to each row."""

    records: list[StepRecord]
    logits: StepLogits  # (B, 1, V): those that the tokens were chosen from


def first_tokens(rows: list[Row], prompt_logits: torch.Tensor, device: Device) -> FirstTokens:
    """Commits what the prompt's forward yields to each row, by its last logits (B, V).

    This needs neither tables nor slots for drafts, so that a streamer has the first token before
    any of them is made.
    """
    drafted = [(row, DraftTree.of_root(row.last_token)) for row in rows]
    logits = read_logits(rows, prompt_logits[:, None], device)
    records = [each for group in _groups(drafted) for each in _walked(group, None)]
    return FirstTokens(records, logits)


def read_logits(rows: list[Row], logits: torch.Tensor, device: Device) -> StepLogits:
    """Asks the device for what the walks need; returns the logits as they are read."""
    if fits_at_once(logits):
        logits = in_float32(logits)
    step_logits = StepLogits(logits, device)
    step_logits.ask()
    for index, row in enumerate(rows):
        row.chooser.read(step_logits, index)
    return step_logits


def walked(drafted: list[Drafted], logits: StepLogits) -> list[StepRecord | None]:
    """What came of each tree, by the logits that were read; None for a row that has failed."""
    records: list[StepRecord | None] = []
    for group in _groups(drafted):
        found: Sequence[StepRecord | None] = [None] * len(group)
        if (first := group[0][0]).error is None:
            with first.guarded():
                found = _walked(group, logits, len(records))
        records += found
    return records


def _groups(drafted: list[Drafted]) -> list[list[Drafted]]:
    """Each row walks down its tree by itself, unless all move together."""
    return [drafted] if drafted[0][0].chooser.moves_together else [[each] for each in drafted]


def _walked(group: list[Drafted], logits: StepLogits | None, first: int = 0) -> list[StepRecord]:
    """What came of each tree. The walk ends where one of them has no child for its token.

    It also ends where a node's logits, those of the group from row `first` on, are NaN. Without
    drafts they are the model's own, and stock chooses by them.
    """
    rows, starts = [row for row, _ in group], [row.num_new for row, _ in group]
    above = [(-1, -1, *row.prompt_ids[-2:], *row.new_ids[-2:])[-2] for row in rows]
    are_padded, is_spoiled = [row.is_padded for row in rows], False

    def commit(nodes: Sequence[int]) -> tuple[Sequence[int], bool] | None:
        nonlocal is_spoiled
        if logits is not None and not rows[0].num_plain:
            is_spoiled = any(logits.has_nan(index, node) for index, node in enumerate(nodes, first))
        return None if is_spoiled else rows[0].chooser.commit(rows, nodes)

    paths = walk([tree for _, tree in group], commit)
    for row in rows:
        row.note_nan(is_spoiled)
    return [
        StepRecord(
            row=row.index,
            tree=tree,
            path=path,
            committed_ids=row.new_ids[start:],
            above=token,
            is_padding=is_padded,
        )
        for (row, tree), path, start, token, is_padded in zip(
            group, paths, starts, above, are_padded, strict=True
        )
    ]
