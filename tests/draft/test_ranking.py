"""What noise makes of chances: it is believed half at first, and then as much as comes true."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from selfspec.config import SpecConfig
from selfspec.draft.calibration import UNKNOWN, Calibration, FixedPrior, NoiseGrid
from selfspec.draft.ranking import Ranking
from selfspec.draft.tree import TreeGrower
from selfspec.records import COMMON, Draws, StepRecord
from tests.strategies import ScriptedCursor, check_tree, probability_of


class KnownNoise(Draws):
    """The noise of a few tokens; that of all others is 1. None: it is unknown."""

    def __init__(
        self, noise: dict[int, float] | None, farthest: int = 9, temperature: float = 1.0
    ) -> None:
        self._noise, self._farthest, self.temperature = noise, farthest, temperature
        self.depths: list[int] = []

    def noise(self, depth):
        self.depths.append(depth)
        return None if depth >= self._farthest else lambda token: self._noise.get(token, 1.0)

    def noise_of(self, ids, depth):
        if self._noise is None:
            return None
        return np.array([self._noise.get(token, 1.0) for token in ids.tolist()])


@pytest.mark.parametrize("belief", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_it_learns_how_much_noise_says(belief: float, p: float) -> None:
    """Nature draws by p, or by noise, or by each of them at half of the places."""
    grid, dice, seen = NoiseGrid(), random.Random(3), list[tuple[float, bool]]()
    for _ in range(6000):
        q = dice.expovariate(1.0)
        by_noise = math.exp((p - 1) * q / p)
        is_hit = dice.random() < (by_noise if dice.random() < belief else p)
        chance, cell = grid.chance(p, q)
        seen.append((chance, is_hit))
        grid.observe(cell, p, is_hit)
    for likely in (True, False):
        part = [pair for pair in seen[2000:] if (pair[0] > p) == likely]
        promised = sum(chance for chance, _ in part)
        assert sum(hit for _, hit in part) == pytest.approx(promised, rel=0.25, abs=12)


def test_a_chance_stays_one_whatever_the_noise() -> None:
    grid = NoiseGrid()
    for p in (0.0, 1e-9, 0.5, 1.0):
        for q in (0.0, 1e-12, 1.0, 80.0):
            assert 0 <= grid.chance(p, q)[0] <= 1
    assert grid.chance(1.0, 5.0)[0] > 0.9


def test_a_copy_learns_for_itself() -> None:
    grid = NoiseGrid()
    chance, cell = grid.chance(0.3, 0.1)
    grid.copy().observe(cell, 0.3, False)
    assert grid.chance(0.3, 0.1) == (chance, cell)


def test_the_tree_grows_where_noise_is_small() -> None:
    """Of two tokens that are as likely, the one with little noise comes first."""
    cursor = ScriptedCursor({0: [(5, 0.4), (6, 0.4)], 6: [(7, 0.5)]}, follows=True)
    draws = KnownNoise({5: 3.0, 6: 0.1, 7: 0.1})
    grower = TreeGrower(
        [cursor], SpecConfig(), Ranking(probability_of, draws=draws, grid=Calibration().grid)
    )
    tree = grower.grow(0, 3)
    check_tree(tree)
    assert tree.tokens == [0, 6, 7]
    assert draws.depths == [0, 1]  # It is looked up once for each depth.
    siblings = tree.looked_at[0]
    assert siblings is not None
    assert siblings.tokens == [6, 5]
    assert siblings.probabilities[0] > 0.4 > siblings.probabilities[1]
    assert UNKNOWN not in siblings.cells


def test_what_knows_the_noise_itself_is_left_as_it_is() -> None:
    cursor = ScriptedCursor({0: [(5, 0.4)]}, name=COMMON)
    ranking = Ranking(probability_of, draws=KnownNoise({}), grid=Calibration().grid)
    grower = TreeGrower([cursor], SpecConfig(), ranking)
    siblings = grower.grow(0, 2).looked_at[0]
    assert siblings is not None
    assert (siblings.probabilities, siblings.cells) == ([0.4], [UNKNOWN])


def test_where_noise_is_unknown_chances_are_those_of_the_evidence() -> None:
    cursor = ScriptedCursor({0: [(5, 0.4)], 5: [(6, 0.4)]}, follows=True)
    draws = KnownNoise({5: 0.1, 6: 0.1}, farthest=1)
    for grid, first in ((Calibration().grid, False), (FixedPrior().grid, True)):
        ranking = Ranking(probability_of, draws=draws, grid=grid)
        tree = TreeGrower([cursor], SpecConfig(), ranking).grow(0, 3)
        at_root, below = tree.looked_at[0], tree.looked_at[1]
        assert at_root is not None
        assert below is None or below.probabilities == [0.4]
        assert (at_root.probabilities == [0.4]) == first


def test_the_calibration_counts_what_noise_promised() -> None:
    calibration = Calibration()
    cursor = ScriptedCursor({0: [(5, 0.4)]})
    noise = KnownNoise({5: 0.1})
    ranking = Ranking(calibration.probability, draws=noise, grid=calibration.grid)
    grower = TreeGrower([cursor], SpecConfig(), ranking)
    chances = []
    for _ in range(200):
        tree = grower.grow(0, 2)
        assert tree.looked_at[0] is not None
        chances.append(tree.looked_at[0].probabilities[0])
        calibration.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[6]))
    assert chances[0] > 0.1 > chances[-1]
    assert calibration.copy().grid is not calibration.grid
    assert FixedPrior().copy().grid is None
