"""A prior is the regression that its docstring names, and only its own model's is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import embedding

from selfspec.neural import map_prior as module
from selfspec.neural.map_prior import MapPrior, PriorSums, fingerprint
from selfspec.weights.rounding import Int8Rows
from tests.fakes import new_model, tiny_model

DIMS, EMBEDDING, NUM_IDS = 6, 16, 50


@pytest.fixture
def embeddings() -> torch.Tensor:
    return torch.randn(NUM_IDS, EMBEDDING, generator=torch.Generator().manual_seed(1))


def pairs(embeddings: torch.Tensor, num: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """States before, tokens, and states after by a law that is linear but for some noise."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(num, DIMS, generator=generator) * torch.tensor([9, 1, 1, 1, 0.1, 0]) + 2
    ids = torch.randint(NUM_IDS, (num,), generator=generator)
    law = torch.randn(DIMS + EMBEDDING, DIMS, generator=torch.Generator().manual_seed(7))
    read = torch.cat([before, embedding(ids, embeddings)], dim=-1)
    return before, ids, read @ law + 0.01 * torch.randn(num, DIMS, generator=generator)


def summed(embeddings: torch.Tensor, *parts: tuple[torch.Tensor, ...]) -> PriorSums:
    sums = PriorSums(embeddings, DIMS)
    for part in parts:
        sums.add(*part)
    return sums


def guessed(prior: MapPrior, embeddings: torch.Tensor, before: Any, ids: Any) -> torch.Tensor:
    read = zip((before, embedding(ids, embeddings)), prior.scales(DIMS), strict=True)
    return prior.guess(*((vectors - mean) * scale for vectors, (mean, scale) in read))


def prior_of(sums: PriorSums, embeddings: torch.Tensor, dims: int = DIMS) -> MapPrior | None:
    return MapPrior.of(sums.arrays(), embeddings, dims)


def test_it_finds_a_linear_law_however_its_pairs_come(embeddings):
    shown = pairs(embeddings, 4000)
    parts = list(zip(*(each.split(77) for each in shown), strict=True))
    before, ids, after = pairs(embeddings, 300, seed=5)
    for sums in (summed(embeddings, shown), summed(embeddings, *parts)):
        prior = prior_of(sums, embeddings)
        assert prior is not None
        # It takes states to have one mean, before and after. Halves and the ridge cost digits.
        known = guessed(prior, embeddings, before, ids) + (shown[2] - shown[0]).mean(0)
        wrong = (known - after).norm(dim=-1).mean() / after.norm(dim=-1).mean()
        assert wrong < 0.03


def test_what_it_reads_is_about_as_long_as_one(embeddings):
    shown = pairs(embeddings, 4000)
    prior = prior_of(summed(embeddings, shown), embeddings)
    assert prior is not None
    read = zip((shown[0], embedding(shown[1], embeddings)), prior.scales(DIMS), strict=True)
    for vectors, (mean, scale) in read:
        scaled = (vectors - mean) * scale
        assert float(scaled.square().sum(-1).mean()) == pytest.approx(1, rel=0.02)
    assert prior.scale[DIMS - 1] == 0, "a number that never changes says nothing"


def test_too_few_pairs_or_numbers_that_are_none_give_no_prior(embeddings):
    assert PriorSums(embeddings, DIMS).arrays() is None
    few = 4 * (DIMS + EMBEDDING)
    assert summed(embeddings, pairs(embeddings, few - 1)).arrays() is None
    assert summed(embeddings, pairs(embeddings, few)).arrays() is not None
    before, ids, after = pairs(embeddings, 99)
    for wrong in (float("nan"), float("inf"), 1e30):
        assert summed(embeddings, (before * wrong, ids, after)).arrays() is None
        assert summed(embeddings, (before, ids, after * wrong)).arrays() is None


def test_only_the_model_that_it_was_made_with_uses_it(embeddings):
    arrays = summed(embeddings, pairs(embeddings, 99)).arrays()
    assert MapPrior.of(None, embeddings, DIMS) is None
    assert MapPrior.of(arrays, embeddings, DIMS) is not None
    assert MapPrior.of(arrays, embeddings.bfloat16(), DIMS) is not None
    assert MapPrior.of(arrays, embeddings, DIMS - 1) is None
    assert MapPrior.of(arrays, embeddings.flip(0), DIMS) is None
    assert MapPrior.of(arrays, Int8Rows.of(embeddings).values(), DIMS) is not None, "in 8 bits"
    wide = {**arrays, "up": np.zeros((DIMS, DIMS + 1), np.float16)}
    assert MapPrior.of(wide, embeddings, DIMS) is None, "it would guess states of another width"


def test_a_fingerprint_needs_few_tokens(embeddings):
    assert np.array_equal(fingerprint(embeddings), fingerprint(embeddings.clone()))
    assert fingerprint(embeddings[:3]).shape == (8,)


def test_models_whose_states_it_cannot_sum_up(monkeypatch):
    assert PriorSums.of(tiny_model()) is not None
    model: Any = new_model()
    model.lm_head = nn.Sequential(model.lm_head)
    assert PriorSums.of(model) is None
    monkeypatch.setattr(module, "_MOST_READ", 2 * tiny_model().config.hidden_size - 1)
    assert PriorSums.of(tiny_model()) is None, "too many numbers"


def test_a_large_one_keeps_the_directions_in_which_guesses_vary_most(embeddings, monkeypatch):
    shown = pairs(embeddings, 4000)
    before, ids, after = pairs(embeddings, 300, seed=5)
    wrong = []
    for rank in (DIMS, 3, 1):
        monkeypatch.setattr(module, "_MOST_NUMBERS", rank * (2 * DIMS + EMBEDDING))
        prior = prior_of(summed(embeddings, shown), embeddings)
        assert prior is not None
        assert prior.down.shape == (DIMS + EMBEDDING, rank)
        assert prior.up.shape == (rank, DIMS)
        left_over = guessed(prior, embeddings, before, ids) - after
        wrong.append(float(left_over.var(0).sum() / after.var(0).sum()))
    assert wrong[0] < 0.001
    assert wrong[0] < wrong[1] < 0.2
    assert wrong[1] < wrong[2] < 0.9
