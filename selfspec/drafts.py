"""The drafts of a step: each row grows a tree, and walks down it by the logits of a forward.

Knows rows and what they draft from; nothing of the model, of KV or of how a forward is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from selfspec.cost import Step
from selfspec.records import DraftTree, StepRecord
from selfspec.row import Row
from selfspec.verify.choosers import StepLogits
from selfspec.verify.walk import walk

T = TypeVar("T")


def draft(rows: Sequence[Row], step: Step) -> None:
    """Grows the tree of each row; the step cuts all of them to the width that pays."""
    for row in rows:
        row.tree = DraftTree.of_root(row.last_token)
        with row.guarded():
            limits = (min(step.max_nodes, row.most_nodes), row.max_depth, step.search())
            row.tree = row.drafter.draft(row.last_token, *limits)
    step.fit([row.tree for row in rows])
    if any(row.is_padded for row in rows):
        _add_pads(rows)


def _add_pads(rows: Sequence[Row]) -> None:
    """Makes the trees of rows that are padded chains of pads, as deep as the deepest of all."""
    deepest = max(max(row.tree.depths) for row in rows)
    for row in rows:
        if row.is_padded:
            for node in range(deepest):
                row.tree.add(node, row.pad_token_id, 1.0)


def in_halves(
    rows: list[Row], run: Callable[[list[Row]], T], may_retry: Callable[[Exception], bool]
) -> Iterator[tuple[list[Row], T]]:
    """What a forward over the trees of all rows gives, or over each half where it fails.

    So no row fails but one that fails alone. Nothing of a part is drawn or committed before its
    forward has succeeded, and rows that have failed are left out. One that `may_retry` after an
    error is first tried as it was.
    """
    left = [rows]
    while left:
        some = left.pop()
        try:
            outputs = run(some)
        except Exception as error:
            if may_retry(error):
                left.append(some)
            elif not some[0].fails_alone:
                raise
            elif len(some) == 1:
                some[0].fail(error)
            else:  # They run once the error has let go of the memory of this forward.
                half = len(some) // 2
                left += [some[half:], some[:half]]
        else:
            yield some, outputs


def walked(
    rows: Sequence[Row], logits: StepLogits, *, of_prompt: bool = False
) -> list[StepRecord | None]:
    """The record of each row's verified tree; None for a row that has failed.

    Each row walks down its tree by itself, unless all move together. The logits of a prompt are
    the model's own, even if they are NaN.
    """
    records: list[StepRecord | None] = []
    moves_together = rows[0].chooser.moves_together
    for group in [rows] if moves_together else [[row] for row in rows]:
        of_group: Sequence[StepRecord | None] = [None] * len(group)
        if group[0].error is None:
            with group[0].guarded():
                of_group = _walked(group, logits, len(records), of_prompt=of_prompt)
        records += of_group
    return records


def _walked(
    rows: Sequence[Row], logits: StepLogits, first: int, *, of_prompt: bool
) -> list[StepRecord]:
    """The walk ends where one of the trees has no child for its token.

    It also ends where a node's logits, those of the rows from index `first` on, are NaN. Without
    drafts they are the model's own, and transformers chooses by them.
    """
    starts, is_spoiled = [row.num_new for row in rows], False
    is_plain = of_prompt or rows[0].is_spoiled
    records = [
        StepRecord(
            row=row.index,
            tree=row.tree,
            above=(-1, -1, *row.prompt_ids[-2:], *row.new_ids[-2:])[-2],
            is_padding=row.is_padded,
        )
        for row in rows
    ]

    def commit(nodes: Sequence[int]) -> tuple[Sequence[int], bool] | None:
        nonlocal is_spoiled
        if not is_plain:
            highest = (logits.likeliest(row, node)[1] for row, node in enumerate(nodes, first))
            is_spoiled = any(map(math.isnan, highest))
        return None if is_spoiled else rows[0].chooser.commit(rows, nodes, logits, first)

    paths = walk([row.tree for row in rows], commit)
    for row, record, start, path in zip(rows, records, starts, paths, strict=True):
        row.is_spoiled = is_spoiled
        record.path, record.committed_ids = path, row.new_ids[start:]
    return records
