"""Noise to come is what will be drawn, and looking at it changes no text and no generator."""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.verify import noise, tape
from selfspec.verify.shortlist import Warpers
from selfspec.verify.tape import NoiseTape, RowDraws
from tests.verify.test_noise import first_difference, orders, scores_of, seeded

VOCAB = 40


class PeekingTape(NoiseTape):
    """Peeks before each draw as a tree does, and perhaps lets somebody else draw after it."""

    def __init__(self, num_rows: int, seed: int = 0, disturbs: float = 0.0) -> None:
        super().__init__(num_rows)
        self.num_right = self.num_wrong = 0
        self._dice, self._disturbs = random.Random(seed), disturbs
        self._promised: dict[tuple[int, int], float] = {}

    def draw(self, scores: torch.Tensor, row: int, index: int) -> int:
        for depth in self._dice.sample(range(4), self._dice.randrange(4)):
            noise = self.peek(row, depth)
            if noise is not None:
                self._promised[row, index + depth] = noise.of(row)(3)
        if self._dice.random() < self._disturbs:
            torch.rand(5)
        token = super().draw(scores, row, index)
        if (promised := self._promised.pop((row, index), None)) is not None:
            is_right = promised == self._taken(index, scores).of(row)(3)
            self.num_right, self.num_wrong = (
                self.num_right + is_right,
                self.num_wrong + 1 - is_right,
            )
        self.reach(row, index + 1)
        return token


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_a_tape_that_peeks_is_stocks_multinomial(data, num_rows, num_steps, seed):
    table = scores_of(num_steps, num_rows, VOCAB, seed)
    order = data.draw(orders(num_rows, num_steps))
    tapes = []

    def new_draw(number: int):
        tapes.append(PeekingTape(number, seed))
        return tapes[0].draw

    assert first_difference(new_draw, order, table, seed) is None
    assert tapes[0].num_wrong == 0


@pytest.fixture(params=["uniforms", "exponentials"])
def way(request, monkeypatch):
    """Both ways in which a torch may make its noise."""
    if request.param == "exponentials":
        monkeypatch.setattr(noise, "_is_made_of_uniforms", lambda: False)


@pytest.fixture
def drawn(monkeypatch) -> list[tuple]:
    """Grows by one whenever noise is drawn."""
    calls, new = list[tuple](), tape.next_noise
    monkeypatch.setattr(tape, "next_noise", lambda *args: calls.append(args) or new(*args))
    # A progress bar of an earlier test may have left a thread.
    monkeypatch.setattr(tape.threading, "active_count", lambda: 1)
    return calls


@pytest.mark.usefixtures("way")
def test_what_is_peeked_is_drawn_once(drawn):
    peeking = PeekingTape(1)
    table = scores_of(30, 1, VOCAB, seed=1)
    assert first_difference(lambda _: peeking.draw, [0] * 30, table, seed=2) is None
    assert peeking.num_right > 15
    assert len(drawn) == 30 + len(peeking._peeked)


@pytest.mark.parametrize("seed", range(8))
def test_whoever_draws_in_between_makes_drafts_worse_and_no_text(seed):
    table = scores_of(30, 1, VOCAB, seed)
    peeking, plain = (PeekingTape(1, seed, disturbs=0.2) for _ in range(2))
    plain.peek = lambda row, depth: None  # type: ignore[method-assign]
    texts = []
    for each in (peeking, plain):
        with seeded(seed):
            tokens = [each.draw(scores[0], 0, step) for step, scores in enumerate(table)]
            texts.append((tokens, torch.get_rng_state().tolist()))
    assert texts[0] == texts[1]
    assert peeking.peek(0, 0) is None  # Once somebody else draws, nobody peeks any more.


def test_beside_another_thread_what_was_peeked_is_drawn_anew(monkeypatch, drawn):
    """It could draw from the same generator between a look at the state and a change of it."""
    monkeypatch.setattr(tape.threading, "active_count", lambda: 2)
    peeking = PeekingTape(1)
    table = scores_of(30, 1, VOCAB, seed=1)
    assert first_difference(lambda _: peeking.draw, [0] * 30, table, seed=2) is None
    assert peeking.num_right > 15
    assert peeking.num_wrong == 0
    assert len(drawn) > 30 + 15


def test_a_generator_of_its_own_is_taken_over_beside_any_thread(monkeypatch):
    monkeypatch.setattr(tape.threading, "active_count", lambda: 2)
    table = scores_of(12, 1, VOCAB, seed=1)
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    peeking = NoiseTape(1, ours)
    for step, scores in enumerate(table):
        assert (peeking.peek(0, 2) is None) == (step == 0)
        stock = torch.multinomial(scores.softmax(-1), 1, generator=theirs)
        assert peeking.draw(scores[0], 0, step) == stock.item()
        peeking.reach(0, step + 1)
    assert len(peeking._peeked) == 2
    assert not torch.equal(ours.get_state(), peeking._peeked[-1].after)


def test_noise_of_another_dtype_is_no_noise_of_these_scores(drawn):
    """As where a processor of the user's returns float16 from some token on."""
    table = scores_of(12, 1, VOCAB, seed=1)
    peeking = NoiseTape(1)
    with seeded(5):
        for step, (scores,) in enumerate(table):
            peeking.peek(0, 3)
            peeking.draw(scores.half() if step > 4 else scores, 0, step)
            peeking.reach(0, step + 1)
    assert {like.dtype for _, like, *_ in drawn[-7:]} == {torch.float16}


def test_nothing_is_peeked_too_far_ahead_nor_after_the_end():
    peeking = NoiseTape(2)
    with seeded(1):
        assert peeking.peek(0, 0) is None  # The first token has not been drawn yet.
        peeking.draw(scores_of(1, 2, VOCAB, seed=0)[0, 0], 0, 0)
        peeking.reach(0, 1)
        assert peeking.peek(0, 7) is not None
        assert peeking.peek(0, 8) is None
        peeking.reach(0, inf)
        assert peeking.peek(0, 0) is None


def test_the_token_that_will_be_drawn_is_ranked_first():
    warpers, table = Warpers(temperature=0.7), scores_of(20, 1, VOCAB, seed=4)
    peeking = NoiseTape(1)
    draws = RowDraws(peeking, 0, warpers)
    with seeded(4):
        for step, (logits,) in enumerate(table):
            ranked = draws.ranked(logits, 0)
            token = peeking.draw(logits / 0.7, 0, step)
            peeking.reach(0, step + 1)
            assert (ranked is None) == (step == 0)
            assert ranked is None or ranked[0][0] == token


@pytest.mark.usefixtures("way")
def test_a_token_far_down_may_be_drawn_and_is_ranked_first():
    peeking, dice = NoiseTape(1), torch.Generator().manual_seed(2)
    draws, num_far = RowDraws(peeking, 0, Warpers()), 0
    with seeded(4):
        for step in range(8):
            logits = torch.randn(2000, generator=dice) / 4
            ranked = draws.ranked(logits, 0)
            token = peeking.draw(logits, 0, step)
            peeking.reach(0, step + 1)
            num_far += bool((logits > logits[token]).sum() > 99)
            assert ranked is None or ranked[0][0] == token
    assert num_far > 4


@pytest.mark.usefixtures("way")
def test_many_are_looked_up_at_once():
    peeking = NoiseTape(2)
    draws, ids = RowDraws(peeking, 1, Warpers()), np.array([3, 0, 39, 7])
    with seeded(2):
        assert draws.noise_of(ids, 0) is None
        peeking.draw(scores_of(1, 2, VOCAB, seed=0)[0, 1], 1, 0)
        peeking.reach(1, 1)
        noise_of, many = draws.noise(2), draws.noise_of(ids, 2)
        assert noise_of is not None
        assert many == pytest.approx([noise_of(token) for token in ids.tolist()], rel=1e-6)
