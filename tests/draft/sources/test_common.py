"""Common tokens are named where noise favours them, at the end of the text alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from selfspec.draft.sources import CommonSource, RowStart
from selfspec.draft.sources import common as module
from selfspec.records import DraftTree, Draws, StepRecord, TopK
from tests.draft.test_ranking import KnownNoise

VOCAB = 200


def told(source: CommonSource, shares: dict[int, float], number: int = 1) -> CommonSource:
    """The model has predicted these tokens, each lesson alike, since a row was sampled."""
    source.open(RowStart(draws=KnownNoise({})))
    ids = np.array([list(shares)], np.int32)
    top = TopK(ids, np.array([list(shares.values())], np.float16))
    for _ in range(number):
        source.observe_pairs(np.array([[1, 2]]), top)
    return source


def named(source: CommonSource, draws: Draws) -> dict[int, int]:
    """The tokens with the bins of their evidence."""
    cursor = source.open(RowStart(draws=draws))
    assert cursor is not None
    return {token: kind.count_bin for token, kind in cursor.expand(cursor.root())}


EVEN = dict.fromkeys(range(10, 20), 0.1)


def test_the_best_by_chance_and_noise_are_named() -> None:
    source = told(CommonSource(VOCAB), EVEN)
    bins = named(source, KnownNoise({12: 1e-4, 13: 0.05, 14: 0.1}))
    assert len(bins) == 6
    assert list(np.array(sorted(bins, key=lambda token: -bins[token]))[:1]) == [12]
    assert bins[12] == len(module._VALUES) > bins[13] > bins[14] > 0


def test_nothing_is_named_of_a_greedy_row_nor_where_noise_is_unknown() -> None:
    source = told(CommonSource(VOCAB), EVEN)
    assert source.open(RowStart()) is None
    assert named(source, KnownNoise(None)) == {}
    assert named(CommonSource(VOCAB), KnownNoise({})) == {}
    cursor = source.open(RowStart(draws=KnownNoise({})))
    assert cursor is not None
    assert cursor.follow(cursor.root(), 12) is None


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_surer_a_row_draws_the_less_noise_says(temperature: float) -> None:
    """Of a token that is four times as common, the noise may be as much larger."""
    source = told(CommonSource(VOCAB), {10: 0.4, **dict.fromkeys(range(11, 18), 0.1)})
    times = 4 ** (1.4 / temperature)
    for factor, first in ((0.9, 10), (1.1, 11)):
        noise = {**dict.fromkeys(range(12, 18), 99.0), 11: 1e-3, 10: factor * times * 1e-3}
        cursor = source.open(RowStart(draws=KnownNoise(noise, temperature=temperature)))
        assert cursor is not None
        cursor.expand(cursor.root())
        ids, chances = cursor._latest()
        ratios = {t: noise[t] / p for t, p in zip(ids.tolist(), chances.tolist(), strict=True)}
        assert min(ratios, key=lambda token: ratios[token]) == first


def test_what_was_predicted_lately_counts_more() -> None:
    source = told(told(CommonSource(VOCAB), {5: 1.0}, 800), {6: 1.0}, 160)
    ids, shares = source.common
    assert dict(zip(ids.tolist(), shares.tolist(), strict=True))[6] > 0.75


def test_sums_stay_numbers_however_long_it_learns() -> None:
    source = told(CommonSource(VOCAB), EVEN, 5000)
    ids, shares = source.common
    assert sorted(ids.tolist()) == sorted(EVEN)
    assert np.allclose(shares, 0.1)


def test_what_is_no_token_is_not_learned() -> None:
    source = told(CommonSource(VOCAB), {-1: 0.5, VOCAB: 0.3, 7: 0.2})
    assert source.common[0].tolist() == [7]


def test_a_copy_learns_for_itself() -> None:
    source = told(CommonSource(VOCAB), EVEN)
    told(source.copy(), {50: 1.0}, 99)
    assert 50 not in source.common[0]
    told(source, {51: 1.0}, 16)
    assert 51 in source.common[0]
    assert math.isclose(source.common[1].sum(), 1.0)


def test_a_cursor_looks_at_what_was_learned_meanwhile() -> None:
    source = told(CommonSource(VOCAB), EVEN)
    cursor = source.open(RowStart(draws=KnownNoise({50: 1e-6})))
    assert cursor is not None
    assert 50 not in dict(cursor.expand(cursor.root()))
    told(source, {50: 1.0}, 16)
    cursor.observe(StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[3]))
    assert 50 in dict(cursor.expand(cursor.root()))


def test_nothing_is_learned_before_a_row_was_sampled() -> None:
    """Greedy rows wait for no lesson."""
    source = CommonSource(VOCAB)
    top = TopK(np.array([[5]], np.int32), np.array([[1.0]], np.float16))
    source.open(RowStart())
    source.observe_pairs(np.array([[1, 2]]), top)
    assert not source._sums.any()
    assert told(source.copy(), EVEN)._sums.any()
