"""The seconds of a batch's step are found out from the steps, whatever was guessed before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from selfspec.batch.latency import Coefficients, Latency, Stage
from selfspec.errors import ConfigError

TRUE = Stage(Coefficients(fixed=0.02, row=0.003, query=0.002), horizon=2000)


def observed(stage: Stage, num_steps: int, *, noise: float = 0.0, slow: float = 1.0) -> Stage:
    chance = random.Random(0)
    for _ in range(num_steps):
        where = chance.randint(1, 16), chance.randint(1, 12), chance.randint(0, 1500)
        seconds = float(TRUE.seconds(*where)) * chance.uniform(1 - noise, 1 + noise)
        stage.observe(*where, seconds * slow)
    return stage


def far_off(stage: Stage) -> float:
    """The greatest relative error on places of all kinds."""
    places = [(1, 1, 0), (1, 10, 800), (8, 1, 100), (16, 11, 1500)]
    return max(abs(float(stage.seconds(*at) / TRUE.seconds(*at)) - 1) for at in places)


def test_a_guess_becomes_what_was_measured():
    stage = Stage.unknown(0.2, horizon=2000)
    assert float(stage.seconds(1, 1)) == pytest.approx(1)
    assert far_off(observed(stage, 200, noise=0.1)) < 0.05
    assert min(stage.coefficients) >= 0


def test_two_steps_set_the_scale():
    assert far_off(observed(Stage.unknown(0.1, horizon=2000), 2)) < 0.5


def test_a_slow_moment_is_forgotten_and_a_change_is_followed():
    stage = observed(Stage.unknown(0.2, horizon=2000), 200)
    stage.observe(4, 4, 100, 60.0)
    assert far_off(stage) < 0.05
    observed(stage, 1000, slow=2.0)
    assert float(stage.seconds(8, 4, 500) / TRUE.seconds(8, 4, 500)) == pytest.approx(2, rel=0.1)


def test_steps_of_one_kind_keep_the_guess_for_all_others():
    stage = Stage.unknown(0.2)
    for _ in range(1000):
        stage.observe(4, 3, 0, 0.064)  # 0.8 + 12 · 0.2 plain steps, at 0.02 seconds each.
    assert float(stage.seconds(4, 3)) == pytest.approx(0.064, rel=0.01)
    assert float(stage.seconds(1, 1)) == pytest.approx(0.02, rel=0.1)


def test_tables_draft_in_one_pass_and_a_model_in_one_forward_for_each_token():
    stage = Stage(Coefficients(0.5, 0.0, 0.25))
    tables, model = Latency(TRUE, stage), Latency(TRUE, stage, by_model=True)
    lengths = np.array([0, 1, 4])
    assert tables.draft_s(2, lengths, 9).tolist() == [0, 1.0, 2.5]
    assert model.draft_s(2, lengths, 9).tolist() == [0, 1.0, 4.0]
    assert float(tables.draft_reading_s(1, 100)) == 0
    assert float(model.draft_reading_s(1, 100)) == pytest.approx(25.5)
    assert Latency(TRUE).draft_s(2, lengths, 9).tolist() == [0, 0, 0]
    assert float(tables.verify_s(2, 3, 9)) == float(TRUE.seconds(2, 4, 9))


@pytest.mark.parametrize("values", [(-1, 0, 1), (0, 0, 0), (1, float("inf"), 0)])
def test_coefficients_that_can_not_be_are_refused(values):
    with pytest.raises(ConfigError, match="coefficients"):
        Stage(Coefficients(*values))
