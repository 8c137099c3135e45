"""Attention of many single queries at once: what it comes to, and to which bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from selfspec import flash
from selfspec.flash import attend_lines, is_exact, lines_of

here_alone = pytest.mark.skipif(
    not is_exact(64), reason="torch attends to single queries in another way here"
)
CONTEXTS = [0, 1, 7, 8, 15, 16, 40, 100, 301, 490, 512, 600, 1024, 1500]


def tree(context: int, size: int) -> NDArray[np.bool_]:
    """The columns that each node of some tree sees."""
    numbers = np.random.default_rng(context + size)
    sees = np.zeros((size, context + size), dtype=np.bool_)
    sees[:, :context] = True
    for node in range(size):
        if node:
            sees[node] |= sees[numbers.integers(max(node - 4, 0), node)]
        sees[node, context + node] = True
    return sees


def states(
    num_heads: int, num_groups: int, sees: NDArray[np.bool_], dim: int, scale: float = 1.0
) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(sees.size + dim)
    num_queries, num_columns = sees.shape
    query = torch.randn(num_heads, num_queries, dim, generator=numbers) * scale
    key, value = torch.randn(2, num_groups, num_columns, dim, generator=numbers)
    return [query.bfloat16(), key.bfloat16(), value.bfloat16()]


def by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: NDArray[np.bool_]
) -> torch.Tensor:
    """Each query alone."""
    outcomes = []
    for number, row in enumerate(sees):
        columns = torch.from_numpy(row.nonzero()[0])
        one = query[None, :, number : number + 1]
        keys, values = key[None, :, columns], value[None, :, columns]
        outcomes.append(scaled_dot_product_attention(one, keys, values, enable_gqa=True)[0])
    return torch.cat(outcomes, dim=1).transpose(0, 1)


def together(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: NDArray[np.bool_]
) -> torch.Tensor:
    lines = lines_of(sees)
    assert lines is not None
    return attend_lines(query, key, value, lines, query.shape[2] ** -0.5)


@pytest.mark.parametrize("context", [0, 5, 40, 600])
def test_it_is_attention(context: int) -> None:
    """On any CPU."""
    sees = tree(context, 5)
    query, key, value = states(4, 2, sees, 16)
    mask = torch.from_numpy(sees)
    expected = scaled_dot_product_attention(
        query[None].float(), key[None].float(), value[None].float(), mask, enable_gqa=True
    )[0]
    found = together(query, key, value, sees)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected.transpose(0, 1), rtol=0.02, atol=0.02)


@here_alone
@pytest.mark.parametrize("size", [1, 5, 24])
@pytest.mark.parametrize("context", CONTEXTS)
def test_it_is_torchs_to_the_bit(context: int, size: int) -> None:
    sees = tree(context, size)
    if lines_of(sees) is None:
        assert context % 512 + size > 512
        return
    for num_heads, num_groups, dim in ((9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 80)):
        tensors = states(num_heads, num_groups, sees, dim, 3.0)
        assert torch.equal(together(*tensors, sees), by_torch(*tensors, sees))


@here_alone
@pytest.mark.parametrize("num_keys", [4, 7, 16, 31, 150, 300, 400, 800])
def test_where_all_but_the_order_of_sums_cancels_out(num_keys: int) -> None:
    query, key, value = states(6, 2, np.ones((3, num_keys), dtype=np.bool_), 64, 3.0)
    places = torch.randperm(2 * num_keys, generator=torch.Generator().manual_seed(num_keys))
    key, value = torch.cat([key, key], 1)[:, places], torch.cat([value, -value], 1)[:, places]
    sees = tree(2 * num_keys - 3, 3)
    found = together(query, key, value, sees)
    assert torch.equal(found, by_torch(query, key, value, sees))


@here_alone
@pytest.mark.parametrize("num_keys", [*range(1, 20), 31, 32, 33, 40, 64, 147, 300, 511])
def test_exponentials_are_added_up_to_the_last_bit(num_keys: int) -> None:
    """One key counts for 1, all others for little: the logarithm of the sum shows each bit."""
    numbers = torch.Generator().manual_seed(num_keys)
    query, key = torch.zeros(2, 60, num_keys, 16)
    query = query[:, :1].clone()
    query[..., 0] = 1
    key[..., 0] = -7 - 4 * torch.rand(60, num_keys, generator=numbers)
    key[torch.arange(60), torch.randint(num_keys, (60,), generator=numbers)] = 0
    query, key = query.bfloat16(), key.bfloat16()
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    expected = attend(query[None], key[None], key[None], 0.0, False, scale=1.0)[1].flatten()

    lines = lines_of(np.ones((1, num_keys), dtype=np.bool_))
    assert lines is not None
    scores = flash._in_line(flash._scores(query[:, None], flash._by_lanes(key)), lines)
    exponentials = flash._exponentials(scores, lines.num_shared, lines)
    sums = flash._sum(exponentials, lines.num_shared, lines).flatten()
    torch.testing.assert_close(sums.double().log(), expected.double(), rtol=2e-7, atol=0)


@here_alone
def test_some_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sees = tree(50, 20)
    tensors = states(4, 2, sees, 64)
    whole = together(*tensors, sees)
    monkeypatch.setattr(flash, "_AT_ONCE", 4 * 4 * 70 * 3)
    assert torch.equal(together(*tensors, sees), whole)


@here_alone
def test_states_that_lie_apart_are_read_right() -> None:
    sees = tree(50, 6)
    query, key, value = states(4, 2, sees, 64)
    expected = together(query, key, value, sees)
    roomy = torch.zeros(2, 100, 64, dtype=torch.bfloat16)
    roomy[:, : key.shape[1]] = key
    others = query.transpose(0, 1).contiguous().transpose(0, 1), roomy[:, : key.shape[1]]
    assert torch.equal(together(*others, value, sees), expected)


def test_lines_hold_what_each_query_sees() -> None:
    sees = np.zeros((3, 60), dtype=np.bool_)
    sees[:, :37] = True
    sees[1, [40, 41, 50]] = sees[2, 59] = True
    lines = lines_of(sees)
    assert lines is not None
    assert lines.num_shared == 32
    assert lines.lengths.flatten().tolist() == [5, 8, 6]
    assert lines.columns.shape == (3, 8)
    own = zip(lines.columns.tolist(), lines.is_filled_up.tolist(), strict=True)
    assert [[c for c, no in zip(*row, strict=True) if not no] for row in own] == [
        [32, 33, 34, 35, 36],
        [32, 33, 34, 35, 36, 40, 41, 50],
        [32, 33, 34, 35, 36, 59],
    ]


def test_each_query_has_a_key_of_its_own() -> None:
    lines = lines_of(np.ones((2, 32), dtype=np.bool_))
    assert lines is not None
    assert (lines.num_shared, lines.lengths.tolist()) == (16, [[16], [16]])


@pytest.mark.parametrize(("context", "fits"), [(505, True), (510, False), (512, True)])
def test_who_ends_in_several_blocks_is_not_done_together(context: int, fits: bool) -> None:
    chain = np.tri(6, context + 6, context, dtype=np.bool_)
    assert (lines_of(chain) is not None) == fits


def test_who_sees_nothing_is_not_done_together() -> None:
    assert lines_of(np.zeros((1, 8), dtype=np.bool_)) is None


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX512"])
def test_other_vectors_are_other_sums(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert not flash._comes_out.__wrapped__(64, 1)


@here_alone
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_exact_exponentials", flash._approximate_exponentials),
        ("_approximate_exponentials", flash._exact_exponentials),
        ("_BLOCK", 256),
        ("_folded", lambda lanes, dim: lanes.sum(dim)),
        ("_in_fours", lambda products: products.unflatten(1, (-1, 4)).sum(-1)),
    ],
)
def test_the_trial_finds_what_is_otherwise(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, name, value)
    assert not flash._comes_out.__wrapped__(64, 1)


def test_it_minds_no_defaults() -> None:
    sees = tree(50, 6)
    tensors = states(4, 2, sees, 64)
    expected = together(*tensors, sees)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(together(*tensors, sees), expected)
            assert flash._comes_out.__wrapped__(64, 1) == is_exact(64)
    finally:
        torch.set_default_dtype(torch.float32)


def test_heads_of_odd_sizes_are_left_alone() -> None:
    assert not is_exact(6)
