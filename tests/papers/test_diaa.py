"""DIAA's tables, and what its tree and probabilities are."""

from __future__ import annotations

import numpy as np
import pytest

from selfspec.errors import ConfigError
from selfspec.papers.diaa import DynamicTree, Tables, recorded
from selfspec.records import TopK

BEHIND_3 = np.array([[-1, 3]])


def top(*entries: tuple[int, float]) -> TopK:
    ids, chances = zip(*entries, strict=True)
    return TopK(np.array([ids], np.int32), np.array([chances], np.float16))


def row_of(tables: Tables) -> list[tuple[int, float]]:
    return [(token, recorded(kind)) for token, kind in tables.next_tokens((3,))]


def test_a_row_is_what_the_model_said_last_with_its_probabilities():
    tables = Tables(2)
    tables.observe_pairs(BEHIND_3, top((5, 0.5), (-1, 0)))
    tables.observe_pairs(BEHIND_3, top((6, 0.75), (7, 0.125)))
    assert row_of(tables) == [(6, 0.75), (7, 0.125)]


def test_a_cache_brings_the_same_rows():
    tables, again = Tables(2), Tables(2)
    tables.observe_pairs(np.array([[1, 3], [3, 4]]), TopK(
        np.array([[5, 6], [7, -1]], np.int32), np.array([[0.5, 0.25], [1, 0]], np.float16)
    ))  # fmt: skip
    again.restore(tables.arrays())
    assert row_of(again) == row_of(tables) == [(5, 0.5), (6, 0.25)]
    assert [token for token, _ in again.next_tokens((4,))] == [7]
    assert again.next_tokens((9,)) == []


def test_equation_2_exempts_the_first_level_from_the_threshold():
    tree = DynamicTree(delta=0.5, alpha=0.1, tau=0.2)
    assert tree.score(0.9, 1, 2) == pytest.approx(0.009)
    assert tree.score(0.9, 2, 0) == pytest.approx(0.45)
    assert tree.score(0.9, 2, 1) is None


@pytest.mark.parametrize("knobs", [{"delta": 0}, {"alpha": 1.1}, {"tau": 1}, {"interval": 0}])
def test_numbers_are_checked(knobs):
    with pytest.raises(ConfigError, match=next(iter(knobs))):
        DynamicTree(**knobs)
