"""No draft is a pad of the model's, and none follows one."""

from __future__ import annotations

from selfspec import SpecConfig
from selfspec.draft.sources.guard import PadGuard
from selfspec.draft.tree import TreeGrower
from selfspec.records import DraftTree, StepRecord
from tests.scripted import TextSource

PAD = 5


def test_no_draft_is_a_pad_or_follows_one() -> None:
    source = TextSource("all", lambda state: [PAD, 6, 7])
    guard = PadGuard(PAD)
    cursors = [source.open([1], learns=False), guard]
    grower = TreeGrower(cursors, SpecConfig(), lambda _: 0.5)

    assert set(grower.grow(1, 8).tokens[1:]) == {6, 7}

    record = StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[6, PAD])
    guard.observe(record)
    assert grower.grow(PAD, 8).tokens == [PAD]
