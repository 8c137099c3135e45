"""What rows commit by the logits of a forward: each row walks down its tree.

Knows rows and trees; nothing of the model, of KV or of what is learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from selfspec.drafts import Drafted
from selfspec.records import StepRecord
from selfspec.verify.choosers import StepLogits
from selfspec.verify.walk import walk


def walked(
    drafted: list[Drafted], logits: StepLogits, *, of_prompt: bool = False
) -> list[StepRecord | None]:
    """What came of each tree, by the logits that were read; None for a row that has failed.

    Each row walks down its tree by itself, unless all move together. The logits of a prompt are
    the model's own, even if they are NaN.
    """
    records: list[StepRecord | None] = []
    moves_together = drafted[0][0].chooser.moves_together
    for group in [drafted] if moves_together else [[pair] for pair in drafted]:
        walk_records: Sequence[StepRecord | None] = [None] * len(group)
        first, _ = group[0]
        if first.error is None:
            with first.guarded():
                walk_records = _walked(group, logits, len(records), of_prompt=of_prompt)
        records += walk_records
    return records


def _walked(
    group: list[Drafted], logits: StepLogits, first: int, *, of_prompt: bool
) -> list[StepRecord]:
    """What came of each tree. The walk ends where one of them has no child for its token.

    It also ends where a node's logits, those of the group from row `first` on, are NaN. Without
    drafts they are the model's own, and stock chooses by them.
    """
    rows, starts = [row for row, _ in group], [row.num_new for row, _ in group]
    above = [(-1, -1, *row.prompt_ids[-2:], *row.new_ids[-2:])[-2] for row in rows]
    are_padded, is_spoiled = [row.is_padded for row in rows], False

    def commit(nodes: Sequence[int]) -> tuple[Sequence[int], bool] | None:
        nonlocal is_spoiled
        if not (of_prompt or rows[0].num_plain):
            highest = (logits.likeliest(row, node)[1] for row, node in enumerate(nodes, first))
            is_spoiled = any(map(math.isnan, highest))
        return None if is_spoiled else rows[0].chooser.commit(rows, nodes, logits, first)

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
