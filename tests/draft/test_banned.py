"""No draft is a pad of the model's, and none follows one."""

from __future__ import annotations

from selfspec import SpecConfig
from selfspec.draft.sources import RowStart
from selfspec.draft.tree import TreeGrower
from tests.scripted import TextSource

PAD = 5


def test_no_draft_is_a_pad_or_follows_one() -> None:
    source = TextSource("all", lambda state: [PAD, 6, 7])
    cursors = [source.open(RowStart(prompt_ids=[1], learns=False))]
    grower = TreeGrower(cursors, SpecConfig(), lambda _: 0.5, banned=PAD)

    assert set(grower.grow(1, 8).tokens[1:]) == {6, 7}
    assert grower.grow(PAD, 8).tokens == [PAD]
