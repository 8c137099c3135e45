"""The tape is `torch.multinomial`, draw by draw, however it comes by its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.verify import noise
from selfspec.verify.shortlist import Warpers, shortlist
from selfspec.verify.tape import NoiseTape

UNEVEN = [0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1]  # Which of two rows moves next.
Draw = Callable[[torch.Tensor, int, int], int]  # (scores, row, step) -> token


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global random stream from a seed on, and as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def scores_of(num_steps: int, num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """(S, B, V), some tokens ruled out as warpers do."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_steps, num_rows, vocab_size, generator=generator) * 3
    ruled_out = torch.rand(logits.shape, generator=generator) < 0.3
    ruled_out[..., 0] = False
    return logits.masked_fill(ruled_out, -torch.inf)


def first_difference(
    new_draw: Callable[[int], Draw], order: list[int], table: torch.Tensor, seed: int
) -> str | None:
    """How a sampler differs from stock's, which draws all rows of a step at once; None: not.

    `order` names the row that moves next, so that rows reach a step at different times.
    """
    num_steps, num_rows, _ = table.shape
    with seeded(seed):
        stock = [
            torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1).tolist()
            for scores in table
        ]
        stock_state = torch.get_rng_state()
    with seeded(seed):
        draw = new_draw(num_rows)
        reached = [0] * num_rows
        for row in order:
            step = reached[row]
            token = draw(table[step, row], row, step)
            if token != stock[step][row]:
                return f"row {row} drew {token} at step {step}, stock {stock[step][row]}"
            reached[row] += 1
        if max(reached) == num_steps and not torch.equal(torch.get_rng_state(), stock_state):
            return "the generator stands elsewhere"
    return None


@st.composite
def orders(draw: st.DrawFn, num_rows: int, num_steps: int) -> list[int]:
    """Every row takes every step, in any order of rows."""
    return draw(st.permutations([row for row in range(num_rows) for _ in range(num_steps)]))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(2, 300), st.integers(0, 99))
def test_the_tape_is_stocks_multinomial(data, num_rows, num_steps, vocab_size, seed):
    table = scores_of(num_steps, num_rows, vocab_size, seed)
    order = data.draw(orders(num_rows, num_steps))
    assert first_difference(lambda n: NoiseTape(n).draw, order, table, seed) is None


@pytest.mark.parametrize(
    ("sizes", "order"),
    [((2, 2, 128_256), [1, 0, 0, 1]), ((6, 3, 50), [0, 0, 2, 1, 1, 1, 1, 1, 1, 2, 2])],
    ids=["a real vocabulary", "a row that stops early"],
)
def test_the_tape_is_stocks_multinomial_here_too(sizes, order):
    table = scores_of(*sizes, seed=5)
    assert first_difference(lambda n: NoiseTape(n).draw, order, table, seed=5) is None


def test_forgetting_frees_what_is_behind_all_rows_and_nothing_else():
    table = scores_of(5, 2, 30, seed=6)
    with seeded(8):
        kept = NoiseTape(2)
        expected = [[kept.draw(table[s, r], r, s) for r in range(2)] for s in range(5)]
    with seeded(8):
        tape = NoiseTape(2)
        assert [tape.draw(table[s, 0], 0, s) for s in range(4)] == [e[0] for e in expected[:4]]
        tape.reach(0, 4)
        tape.reach(1, 2)
        tape.reach(1, 1)  # nothing left to forget there
        assert len(tape._noise) == 2
        assert [tape.draw(table[s, 1], 1, s) for s in (2, 3, 4)] == [e[1] for e in expected[2:]]
        tape.reach(0, inf)  # the row has ended
        tape.reach(1, 5)
        assert tape._noise == {}


# -- numbers that are made only where they matter ----------------------------------------------


@pytest.fixture(params=["uniforms", "exponentials"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a torch may make its noise."""
    if request.param == "exponentials":
        monkeypatch.setattr(noise, "_is_made_of_uniforms", lambda: False)
    return str(request.param)


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """Grows by one whenever stock's own noise is made out of what was drawn."""
    calls = []
    make = noise._Uniforms._made

    def counting(uniforms):
        calls.append(1)
        return make(uniforms)

    monkeypatch.setattr(noise._Uniforms, "_made", counting)
    return calls


needs_uniforms = pytest.mark.skipif(
    not noise._is_made_of_uniforms(), reason="this torch does not make its noise of uniforms"
)


@needs_uniforms
def test_stocks_own_noise_is_hardly_ever_made(made):
    table = scores_of(400, 1, 1000, seed=7)
    assert first_difference(lambda n: NoiseTape(n).draw, [0] * 400, table, seed=7) is None
    assert len(made) <= 2


def test_another_default_dtype_changes_nothing(monkeypatch):
    monkeypatch.setattr(noise, "_CLEARLY", 1e30)  # so that stock's own noise is made, too
    table = scores_of(6, 1, 300, seed=7)
    noise._is_made_of_uniforms.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert first_difference(lambda n: NoiseTape(n).draw, [0] * 6, table, seed=7) is None
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_device_without_doubles_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "double", None)
    ones = noise.Drawn(lambda _: torch.ones(1, 3), None)
    assert noise._Exponentials(ones).pick(torch.tensor([0.0, 3.0, 1.0]), 0) == 1


@needs_uniforms
def test_it_is_made_where_two_tokens_are_nearly_equal(made, monkeypatch):
    monkeypatch.setattr(noise, "_CLEARLY", 1e30)
    table = scores_of(6, 2, 300, seed=7)
    assert first_difference(lambda n: NoiseTape(n).draw, UNEVEN, table, seed=7) is None
    assert len(made) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scores_of_any_dtype_are_drawn_from_as_stock_does(dtype, way):
    table = scores_of(6, 2, 300, seed=7).to(dtype)
    assert first_difference(lambda n: NoiseTape(n).draw, UNEVEN, table, seed=7) is None


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 1.0, 50.0])
@pytest.mark.parametrize("num_left", [1, 2, 50, 1000])
def test_any_temperature_and_any_number_of_tokens_left(temperature, num_left):
    table = scores_of(50, 1, 1000, seed=9) / temperature
    least = table.topk(num_left, dim=-1).values[..., -1:]
    table = table.masked_fill(table < least, -torch.inf)
    assert first_difference(lambda n: NoiseTape(n).draw, [0] * 50, table, seed=9) is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_stock_refuses_is_refused_in_its_words(bad):
    """One NaN, one infinity, or nothing that could be drawn."""
    scores = torch.zeros(40)
    scores[7 if bad != -torch.inf else slice(None)] = bad
    with pytest.raises(RuntimeError) as stock:
        torch.multinomial(scores.softmax(-1), 1)
    with pytest.raises(RuntimeError) as ours:
        NoiseTape(1).draw(scores, 0, 0)
    assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize("spread", [0.001, 0.1, 1.0, 5.0])
def test_tokens_beside_the_shortlist_win_as_often_as_by_stock(spread, way):
    """Over flat scores nearly all that win stand beside it."""
    table = scores_of(300, 1, 3000, seed=3) / 3 * spread
    asked = []

    def new_draw(num_rows: int) -> Draw:
        tape = NoiseTape(num_rows)

        def draw(scores: torch.Tensor, row: int, step: int) -> int:
            few = shortlist(scores, Warpers())
            token = tape.draw_from(few, scores, row, step)
            asked.append(token)
            return tape.draw(scores, row, step) if token is None else token

        return draw

    assert first_difference(new_draw, [0] * 300, table, seed=11) is None
    assert asked.count(None) <= 2


# -- rows that are far apart ---------------------------------------------------------------------


def in_memory(tape: NoiseTape) -> int:
    drawn = [noise.drawn._numbers for noise in tape._noise.values()]
    return sum(numbers.nbytes for numbers in drawn if numbers is not None)


def test_noise_of_rows_that_are_far_apart_takes_little_memory(way, monkeypatch):
    """What was forgotten is drawn again, and nobody who draws later gets other numbers."""
    table = scores_of(40, 3, 200, seed=2)
    order, tapes = [0] * 40 + [1] * 20 + [2, 1] * 20 + [2] * 20, []

    def new_draw(num_rows: int) -> Draw:
        tape = NoiseTape(num_rows)
        tapes.append(tape)

        def draw(scores: torch.Tensor, row: int, step: int) -> int:
            token = tape.draw(scores, row, step)
            tape.reach(row, step + 1)
            most.append(in_memory(tape))
            return token

        return draw

    most: list[int] = []
    assert first_difference(new_draw, order, table, seed=7) is None
    whole = max(most)
    monkeypatch.setattr("selfspec.verify.tape._MOST_BYTES", whole // 10)
    most.clear()
    assert first_difference(new_draw, order, table, seed=7) is None
    assert max(most) <= whole // 10 + whole // 40
    assert all(tape._noise == {} for tape in tapes)


def test_scores_may_be_of_another_kind_in_each_step() -> None:
    """As where a logits processor of the user's cuts the vocabulary off in one step."""
    table = [scores_of(1, 1, size, seed=size)[0] for size in (50, 30, 50)]
    with seeded(5):
        tape, tokens = NoiseTape(1), []
        for step, scores in enumerate(table):
            tokens.append(tape.draw(scores[0], 0, step))
        state = torch.get_rng_state()
    with seeded(5):
        expected = [torch.multinomial(s.softmax(-1), num_samples=1).item() for s in table]
        assert torch.equal(torch.get_rng_state(), state)
    assert tokens == expected
