"""How far noise is trusted follows from how well it foretold what was drawn."""

from __future__ import annotations

import math
import random

import pytest

from selfspec.draft.luck import NoiseTrust
from selfspec.records import Evidence, Siblings

TABLES, TEXT = (Evidence("lut"),), (Evidence("context", match_length=2),)


def siblings(probabilities: list[float], kinds: tuple[Evidence, ...] = TABLES) -> Siblings:
    return Siblings(list(range(len(probabilities))), probabilities, [kinds] * len(probabilities))


def noise(dice: random.Random) -> float:
    return -math.log(1 - dice.random())


def draws(trust: NoiseTrust, num_draws: int, sure: float, kinds: tuple[Evidence, ...]) -> None:
    """Draws by the true probabilities, of which a share of `sure` is what the tables say."""
    dice = random.Random(3)
    for _ in range(num_draws):
        known = [0.5, 0.3, 0.1]
        true = known if dice.random() < sure else dice.sample(known, 3)
        numbers = [noise(dice) for _ in range(4)]
        ratios = [p / q for p, q in zip([*true, 0.1], numbers, strict=True)]
        drawn = ratios.index(max(ratios))
        trust.observe(trust.weighed(siblings(known, kinds), numbers.__getitem__), drawn)


def test_luck_raises_a_candidate_and_keeps_the_sum_below_one() -> None:
    lucky = NoiseTrust().weighed(siblings([0.5, 0.4]), {0: 1.0, 1: 0.01}.__getitem__)
    assert lucky.tokens == [1, 0]
    assert lucky.before_noise == [0.4, 0.5]
    assert lucky.noise == [0.01, 1.0]
    assert lucky.probabilities[0] > 0.4 > lucky.probabilities[1]
    assert sum(lucky.probabilities) < 1


def test_what_knows_nothing_earns_none_and_others_keep_theirs() -> None:
    trust = NoiseTrust()
    draws(trust, 300, sure=1.0, kinds=TABLES)
    dice = random.Random(1)
    for _ in range(300):  # What comes is no matter of noise.
        seen = trust.weighed(siblings([0.5, 0.4], TEXT), lambda _: noise(dice))
        trust.observe(seen, dice.choice([0, 0, 0, 0, 0, 1, 1, 1, 1, 9]))
    one_is_lucky = {0: 1.0, 1: 0.1}.__getitem__
    assert trust.weighed(siblings([0.5, 0.4], TEXT), one_is_lucky).probabilities == pytest.approx(
        [0.5, 0.4], abs=0.02
    )
    assert trust.weighed(siblings([0.5, 0.4]), one_is_lucky).probabilities[0] > 0.8


@pytest.mark.parametrize("number", [0.0, 1e-300, 80.0])
def test_odd_noise_breaks_nothing(number: float) -> None:
    trust = NoiseTrust()
    seen = trust.weighed(siblings([0.5, 0.0]), lambda _: number)
    trust.observe(seen, 7)
    assert all(0 <= chance <= 1 for chance in seen.probabilities)
