"""Noise read ahead is the noise that will be drawn, and stock's generator never notices."""

from __future__ import annotations

import pytest
import torch

from selfspec.verify import noise
from selfspec.verify.tape import _FARTHEST as FARTHEST
from selfspec.verify.tape import NoiseTape
from tests.verify.test_noise import scores_of, seeded

SEED = 5


def stock(table: torch.Tensor) -> tuple[list[list[int]], list[int]]:
    """Stock's tokens of each step and row, and the generator's state behind them."""
    with seeded(SEED):
        tokens = [torch.multinomial(s.softmax(-1), num_samples=1)[:, 0].tolist() for s in table]
        return tokens, torch.get_rng_state().tolist()


@pytest.fixture(params=["uniforms", "exponentials"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a torch may make its noise."""
    if request.param == "exponentials":
        monkeypatch.setattr(noise, "_is_made_of_uniforms", lambda: False)
    return str(request.param)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("far", [0, 1, 5])
def test_reading_ahead_changes_no_token_and_no_state(way: str, num_rows: int, far: int) -> None:
    table = scores_of(8, num_rows, 50, seed=1)
    with seeded(SEED):
        tape = NoiseTape(num_rows)
        tokens = []
        for step, scores in enumerate(table):
            tokens.append([tape.draw(scores[row], row, step) for row in range(num_rows)])
            for row in range(num_rows):
                tape.reach(row, step + 1)
            for depth in range(far):
                tape.ahead(num_rows - 1, step + 1 + depth)
        state = torch.get_rng_state()
    assert (tokens, state.tolist()) == stock(table)


def test_what_is_read_ahead_comes_true(way: str) -> None:
    table = scores_of(4, 2, 50, seed=1)
    with seeded(SEED):
        tape = NoiseTape(2)
        tape.draw(table[0, 0], 0, 0)
        foretold = [tape.ahead(1, step) for step in range(1, 4)]
        for step, noise_of in enumerate(foretold, start=1):
            assert noise_of is not None
            ratios = table[step, 1].softmax(-1) / torch.tensor([noise_of(t) for t in range(50)])
            assert tape.draw(table[step, 1], 1, step) == int(ratios.argmax())


def test_somebody_else_who_draws_or_seeds_makes_it_forget(way: str) -> None:
    table = scores_of(3, 1, 50, seed=1)

    def drawn(ahead: bool) -> list[int]:
        with seeded(SEED):
            tape, tokens = NoiseTape(1), []
            for step, scores in enumerate(table):
                tokens.append(tape.draw(scores[0], 0, step))
                if ahead:
                    tape.ahead(0, step + 2)
                torch.rand(1)  # a logits processor of the user's
            return tokens

    assert drawn(ahead=True) == drawn(ahead=False)


def test_there_is_an_end_to_it_and_a_beginning() -> None:
    tape = NoiseTape(1)
    assert tape.ahead(0, 0) is None  # Nobody knows yet of which vocabulary.
    with seeded(SEED):
        tape.draw(torch.zeros(9), 0, 0)
        tape.reach(0, 1)
        assert tape.ahead(0, 0) is None  # It is behind the row.
        assert tape.ahead(0, 1) is not None
        assert tape.ahead(0, 1 + FARTHEST) is None


def test_noise_that_is_left_over_is_not_taken_for_the_next() -> None:
    """One is read ahead and comes true; the next ones are drawn without a look ahead."""
    table = scores_of(4, 1, 50, seed=2)
    with seeded(SEED):
        tape, tokens = NoiseTape(1), []
        for step, scores in enumerate(table):
            if step == 1:
                tape.ahead(0, 1)
            tokens.append([tape.draw(scores[0], 0, step)])
            if step == 3:
                assert tape.ahead(0, 4) is not None
        state = torch.get_rng_state()
    assert (tokens, state.tolist()) == stock(table)


def test_scores_of_another_kind_than_expected_are_drawn_for_anew() -> None:
    """As where a logits processor of the user's cuts the vocabulary off in one step."""
    table = [scores_of(1, 1, size, seed=size)[0] for size in (50, 30, 50)]
    with seeded(SEED):
        tape, tokens = NoiseTape(1), []
        for step, scores in enumerate(table):
            tokens.append(tape.draw(scores[0], 0, step))
            tape.ahead(0, step + 2)
        state = torch.get_rng_state()
    with seeded(SEED):
        expected = [torch.multinomial(s.softmax(-1), num_samples=1).item() for s in table]
        assert torch.equal(torch.get_rng_state(), state)
    assert tokens == expected
