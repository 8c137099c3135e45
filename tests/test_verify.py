"""The walk is the one greedy path; the tape is `torch.multinomial`, draw by draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.records import DraftTree
from selfspec.verify import NoiseTape, walk
from tests.strategies import ALPHABET, trees

# -- the walk ----------------------------------------------------------------------------------


@given(trees(max_nodes=10, alphabet=ALPHABET), st.lists(st.integers(0, ALPHABET - 1), min_size=10))
def test_the_walk_follows_the_models_tokens_as_far_as_the_tree_goes(tree, tokens):
    """`tokens[i]` is what the model says behind node i."""
    asked = []

    def commit(node: int) -> tuple[int, bool]:
        asked.append(node)
        return tokens[node], False

    path = walk(tree, commit)
    assert asked == path
    assert path[0] == 0
    for above, below in pairwise(path):
        assert tree.parents[below] == above
        assert tree.tokens[below] == tokens[above]
    assert tokens[path[-1]] not in tree.children[path[-1]]


@given(trees(max_nodes=10, alphabet=ALPHABET), st.integers(1, 5))
def test_the_walk_ends_where_the_row_stops(tree, num_commits):
    """Even where the tree knows what would follow."""
    asked = []

    def commit(node: int) -> tuple[int, bool]:
        asked.append(node)
        token = min(tree.children[node], default=0)
        return token, len(asked) == num_commits

    path = walk(tree, commit)
    assert path == asked
    assert len(path) <= num_commits


def test_the_walk_of_a_lone_root_is_plain_decoding():
    assert walk(DraftTree.of_root(3), lambda node: (4, False)) == [0]


# -- the tape ----------------------------------------------------------------------------------

Draw = Callable[[torch.Tensor, int, int], int]  # (probabilities, row, step) -> token


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global random stream from a seed on, and as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def probabilities(num_steps: int, num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """(S, B, V), some tokens ruled out as warpers do."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_steps, num_rows, vocab_size, generator=generator) * 3
    ruled_out = torch.rand(logits.shape, generator=generator) < 0.3
    ruled_out[..., 0] = False
    return logits.masked_fill(ruled_out, -torch.inf).softmax(-1)


def first_difference(
    new_draw: Callable[[int], Draw], order: list[int], table: torch.Tensor, seed: int
) -> str | None:
    """How a sampler differs from stock's, which draws all rows of a step at once; None: not.

    `order` names the row that moves next, so that rows reach a step at different times.
    """
    num_steps, num_rows, _ = table.shape
    with seeded(seed):
        stock = [torch.multinomial(p, num_samples=1).squeeze(1).tolist() for p in table]
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


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(2, 300), st.integers(0, 99))
def test_the_tape_is_stocks_multinomial(data, num_rows, num_steps, vocab_size, seed):
    table = probabilities(num_steps, num_rows, vocab_size, seed)
    order = data.draw(orders(num_rows, num_steps))
    assert first_difference(lambda n: NoiseTape(n).draw, order, table, seed) is None


def test_the_tape_is_stocks_multinomial_for_a_real_vocabulary():
    table = probabilities(2, 2, 128_256, seed=5)
    assert first_difference(lambda n: NoiseTape(n).draw, [1, 0, 0, 1], table, seed=5) is None


def test_a_row_that_stops_early_leaves_the_others_their_noise():
    table = probabilities(6, 3, 50, seed=2)
    order = [0, 0, 2, 1, 1, 1, 1, 1, 1, 2, 2]
    assert first_difference(lambda n: NoiseTape(n).draw, order, table, seed=3) is None


def draws_a_row_at_a_time(_num_rows: int) -> Draw:
    return lambda p, row, step: int(torch.multinomial(p, 1))


def draws_one_row_of_noise(_num_rows: int) -> Draw:
    tape = NoiseTape(1)
    return lambda p, row, step: tape.draw(p, 0, step)


def draws_anew_for_each_row(num_rows: int) -> Draw:
    return lambda p, row, step: NoiseTape(num_rows).draw(p, row, 0)


def mixes_up_rows(num_rows: int) -> Draw:
    tape = NoiseTape(num_rows)
    return lambda p, row, step: tape.draw(p, num_rows - 1 - row, step)


def takes_the_likeliest(_num_rows: int) -> Draw:
    return lambda p, row, step: int(p.argmax())


def inverts_the_distribution(_num_rows: int) -> Draw:
    return lambda p, row, step: int((p.cumsum(-1) < torch.rand(1)).sum())


def draws_once_too_often(num_rows: int) -> Draw:
    """Right ids, but the stream behind them is shifted for whoever draws next."""
    tape = NoiseTape(num_rows)

    def draw(p: torch.Tensor, row: int, step: int) -> int:
        token = tape.draw(p, row, step)
        if (row, step) == (num_rows - 1, 7):
            torch.rand(1)
        return token

    return draw


WRONG = [
    draws_a_row_at_a_time,
    draws_anew_for_each_row,
    draws_one_row_of_noise,
    draws_once_too_often,
    inverts_the_distribution,
    mixes_up_rows,
    takes_the_likeliest,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_sampler_is_found_out(wrong):
    """Most of these draw from the right distribution; none is stock's stream."""
    table = probabilities(8, 2, 40, seed=1)
    order = [0, 1, 1, 0] * 4  # in step, one draw a row is the same stream on a CPU
    assert first_difference(lambda n: NoiseTape(n).draw, order, table, seed=4) is None
    assert first_difference(wrong, order, table, seed=4) is not None


def test_forgetting_frees_what_is_behind_all_rows_and_nothing_else():
    table = probabilities(5, 2, 30, seed=6)
    with seeded(8):
        kept = NoiseTape(2)
        expected = [[kept.draw(table[s, r], r, s) for r in range(2)] for s in range(5)]
    with seeded(8):
        tape = NoiseTape(2)
        assert [tape.draw(table[s, 0], 0, s) for s in range(4)] == [e[0] for e in expected[:4]]
        tape.forget_before(2)
        tape.forget_before(1)  # nothing left to forget there
        assert len(tape._kept) == 2
        assert [tape.draw(table[s, 1], 1, s) for s in (2, 3, 4)] == [e[1] for e in expected[2:]]
        tape.forget_before(5)
        assert tape._kept == []
