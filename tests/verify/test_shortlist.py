"""A shortlist is what stock's warpers leave, or nothing is said."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as lp

from selfspec.verify.shortlist import Warpers, shortlist
from selfspec.verify.tape import NoiseTape


def stock_leaves(logits: torch.Tensor, warpers: Warpers) -> torch.Tensor:
    """What is left of logits (V,) behind stock's own warpers, in stock's order."""
    scores = logits[None]
    if warpers.temperature is not None:
        scores = lp.TemperatureLogitsWarper(warpers.temperature)(None, scores)
    if warpers.top_k is not None:
        scores = lp.TopKLogitsWarper(warpers.top_k)(None, scores)
    if warpers.top_p is not None:
        scores = lp.TopPLogitsWarper(warpers.top_p)(None, scores)
    if warpers.min_p is not None:
        scores = lp.MinPLogitsWarper(warpers.min_p)(None, scores)
    return scores[0]


def check(logits: torch.Tensor, warpers: Warpers) -> bool:
    """True where something was said, which then is what stock leaves."""
    few = shortlist(logits, warpers)
    if few is None:
        return False
    left = stock_leaves(logits, warpers)
    expected = torch.nonzero(left != -torch.inf).flatten().numpy()
    others = np.setdiff1d(expected, few.tokens)
    assert few.rest is not None or not len(others)
    assert np.array_equal(np.sort(np.concatenate([few.tokens, others])), expected)
    if few.rest is not None:
        found = few.rest(others)
        chances = (left[torch.from_numpy(others)].double() - left.max()).exp().numpy()
        assert (np.abs(found - chances) <= np.maximum(1e-6 * chances, 1e-12)).all()
        assert max(found) <= few.weights[-1]
    weights = (left[few.tokens].double() - left.max().double()).exp().tolist()
    assert few.weights == pytest.approx(weights, rel=1e-9)
    assert few.weights == sorted(few.weights, reverse=True)
    return True


def some_logits(num_tokens: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed)) * spread


some_warpers = st.builds(
    Warpers,
    st.none() | st.sampled_from([0.01, 0.3, 0.7, 1.5, 100.0]),
    st.none() | st.integers(1, 70),
    st.none() | st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 0.999]),
    st.none() | st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=90)
@given(
    some_warpers, st.integers(1, 2000), st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 3, 20])
)
def test_what_is_said_is_what_stock_leaves(dtype, warpers, num_tokens, seed, spread):
    """Half precision has few values, and thresholds fall between equal ones."""
    check(some_logits(num_tokens, seed, spread).to(dtype).float(), warpers)


@pytest.mark.parametrize(
    "warpers",
    [
        Warpers(0.3, 50),
        Warpers(top_k=1),
        Warpers(0.7, 20, 0.8),
        Warpers(0.6, 50, 0.9),
        Warpers(0.3, top_p=0.9),
        Warpers(0.7, min_p=0.1),
        Warpers(1.2, 40, 0.95, 0.05),
        Warpers(0.7),
        Warpers(),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [8192, pytest.param(128_256, marks=pytest.mark.slow)])
def test_something_is_said_nearly_always(warpers, num_tokens):
    said = [check(some_logits(num_tokens, seed), warpers) for seed in range(60)]
    assert sum(said) >= 58


@pytest.mark.parametrize(
    ("logits", "warpers"),
    [
        ([3.0] + [2.0] * 40, Warpers(top_k=2)),  # more equal the second than are looked at
        ([1.0] * 300, Warpers(top_p=0.5)),  # which half, hangs on how they are sorted
        ([math.log(0.5), math.log(0.3), math.log(0.2)], Warpers(top_p=0.5)),  # on the threshold
        ([0.0, math.log(0.25)], Warpers(min_p=0.25)),  # likewise
        ([0.0] * 2000, Warpers(top_p=0.9)),  # too flat for those looked at
        ([0.0] * 2000, Warpers(min_p=0.9)),
        ([0.0] * 20 + [math.nan], Warpers(top_k=5)),
        ([0.0] * 20 + [math.inf], Warpers(top_k=5)),
        ([-math.inf] * 20, Warpers(top_k=5)),
        ([0.0] * 2000, Warpers(top_k=1000)),  # arrays are faster
    ],
)
def test_where_it_is_not_sure_nothing_is_said(logits, warpers):
    assert shortlist(torch.tensor(logits), warpers) is None


@pytest.mark.parametrize("tail", [0.05, 0.1, 0.3, 0.5])
def test_thresholds_that_hang_on_how_a_long_flat_tail_is_summed(tail):
    """Equal small numbers round alike each time they are added: float32 sums drift."""
    num_tokens, num_high = 151_936, 60
    generator = torch.Generator().manual_seed(int(100 * tail))
    high = torch.randn(num_high, generator=generator).abs() * 1.5
    low = high.double().exp().sum() * tail / (1 - tail) / (num_tokens - num_high)
    logits = torch.full((num_tokens,), math.log(low))
    logits[torch.randperm(num_tokens, generator=generator)[:num_high]] = high
    above = logits.double().softmax(-1).sort(descending=True).values.cumsum(0)
    beside = [sign * off for off in (2e-5, 5e-5, 1e-4, 1e-3, 4e-3) for sign in (-1, 1)]
    said = [
        check(logits, Warpers(top_p=float(above[place]) + off))
        for place in (20, 40, 55)
        for off in beside
    ]
    assert any(said)


def test_what_is_ruled_out_before_stays_out():
    logits = some_logits(500, seed=1)
    logits[logits < 5] = -torch.inf
    assert check(logits, Warpers(0.5, 200))
    assert check(logits, Warpers(0.5, 50))
    assert check(logits, Warpers(0.5, top_p=0.9))


@given(some_warpers, st.integers(2, 1000), st.integers(0, 999))
def test_what_is_drawn_from_it_is_what_stock_draws(warpers, num_tokens, seed):
    logits = some_logits(num_tokens, seed)
    few = shortlist(logits, warpers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stock = int(torch.multinomial(stock_leaves(logits, warpers).softmax(-1), 1))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        drawn = None if few is None else NoiseTape(1).draw_from(few, logits, 0, 0)
        assert drawn in (None, stock)
        assert few is None or torch.equal(torch.get_rng_state(), state)
