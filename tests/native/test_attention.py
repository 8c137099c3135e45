"""Attention of single queries by code of our own: what it comes to, and to which bits."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from selfspec.native import Lines, attend, attends, attention
from selfspec.native.kernel import compiled

BF16 = torch.bfloat16
HALVES = [torch.bfloat16, torch.float16]
CONTEXTS = [0, 1, 7, 8, 15, 16, 40, 100, 301, 490, 510, 512, 600, 1024, 1500]

here = pytest.mark.skipif(
    attention._kernel(BF16, 64) is None, reason="nothing can be compiled, or run by torch's threads"
)
here_exact = pytest.mark.skipif(
    not attends(BF16, 64), reason="torch attends to single queries in another way here"
)


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
    num_heads: int,
    num_groups: int,
    sees: NDArray[np.bool_],
    dim: int,
    scale: float = 1.0,
    dtype: torch.dtype = BF16,
) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(sees.size + dim)
    num_queries, num_columns = sees.shape
    query = torch.randn(num_heads, num_queries, dim, generator=numbers) * scale
    key, value = torch.randn(2, num_groups, num_columns, dim, generator=numbers)
    return [query.to(dtype), key.to(dtype), value.to(dtype)]


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


def by_us(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: NDArray[np.bool_]
) -> torch.Tensor:
    return attend(query, key, value, Lines.of(sees), query.shape[2] ** -0.5)


@here
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("context", [0, 5, 40, 600])
def test_it_is_attention(context: int, dtype: torch.dtype) -> None:
    """On any CPU, in either half."""
    sees = tree(context, 5)
    query, key, value = states(4, 2, sees, 16, dtype=dtype)
    mask = torch.from_numpy(sees)
    expected = scaled_dot_product_attention(
        query[None].float(), key[None].float(), value[None].float(), mask, enable_gqa=True
    )[0]
    found = by_us(query, key, value, sees)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected.transpose(0, 1), rtol=0.02, atol=0.02)


@here_exact
@pytest.mark.parametrize("size", [1, 5, 24])
@pytest.mark.parametrize("context", CONTEXTS)
def test_it_is_torchs_to_the_bit(context: int, size: int) -> None:
    sees = tree(context, size)
    for num_heads, num_groups, dim in ((9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 80)):
        tensors = states(num_heads, num_groups, sees, dim, 3.0)
        assert torch.equal(by_us(*tensors, sees), by_torch(*tensors, sees))


@here_exact
@pytest.mark.parametrize("num_keys", [*range(1, 20), 31, 32, 33, 40, 64, 147, 300, 511, 513])
def test_of_a_hundred_thousand_outcomes_none_differs(num_keys: int) -> None:
    """What a few bits of a sum change shows in few of them."""
    sees = np.ones((4, num_keys), dtype=np.bool_)
    tensors = states(400, 200, sees, 64, 2.0)
    assert torch.equal(by_us(*tensors, sees), by_torch(*tensors, sees))


@here_exact
@pytest.mark.parametrize("num_keys", [4, 7, 16, 31, 150, 300, 400, 800])
def test_where_all_but_the_order_of_sums_cancels_out(num_keys: int) -> None:
    query, key, value = states(6, 2, np.ones((3, num_keys), dtype=np.bool_), 64, 3.0)
    places = torch.randperm(2 * num_keys, generator=torch.Generator().manual_seed(num_keys))
    key, value = torch.cat([key, key], 1)[:, places], torch.cat([value, -value], 1)[:, places]
    sees = tree(2 * num_keys - 3, 3)
    assert torch.equal(by_us(query, key, value, sees), by_torch(query, key, value, sees))


@here_exact
def test_states_that_lie_apart_are_read_right() -> None:
    sees = tree(50, 6)
    query, key, value = states(4, 2, sees, 64)
    expected = by_us(query, key, value, sees)
    roomy = torch.zeros(2, 100, 64, dtype=BF16)
    roomy[:, : key.shape[1]] = key
    turned = value.transpose(1, 2).contiguous().transpose(1, 2)
    others = query.transpose(0, 1).contiguous().transpose(0, 1), roomy[:, : key.shape[1]], turned
    assert torch.equal(by_us(*others, sees), expected)


def test_lines_hold_what_each_query_sees() -> None:
    sees = np.zeros((3, 12), dtype=np.bool_)
    sees[:, :3] = True
    sees[1, [5, 7]] = sees[2, 11] = True
    lines = Lines.of(sees)
    assert lines.lengths.tolist() == [3, 5, 4]
    found = [line[:n].tolist() for line, n in zip(*lines, strict=True)]
    assert found == [[0, 1, 2], [0, 1, 2, 5, 7], [0, 1, 2, 11]]


def summed_in_order(code: Any, value: Any) -> Any:
    numbers = [code.extract_element(value, place) for place in lanes_of(value)]
    return reduce(code.fadd, numbers)


def lanes_of(value: Any) -> list[Any]:
    from selfspec.native.code import I32

    return [I32(place) for place in range(value.type.count)]


@here_exact
@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("attention_code", "_BLOCK", 256),
        ("attention_code", "_LOG2_E", 1.4427),
        ("attention_code", "_POLYNOMIAL", (-0.0792042402, -0.224338365, 0.303542605, 0.0001071)),
        ("code.Code", "folded", summed_in_order),
        ("code.Code", "rounded", lambda _code, value: value),
        ("attention_code", "EXP", "llvm.exp2.f32"),
    ],
)
def test_the_trial_finds_what_is_otherwise(
    where: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfspec.native import attention_code

    monkeypatch.setattr(f"selfspec.native.{where}.{name}", value)
    changed = compiled(lambda: attention_code.attention_code(BF16, 64))
    monkeypatch.setattr(attention, "_kernel", lambda _dtype, _dim: changed)
    assert not attention._comes_out.__wrapped__(BF16, 64, 1)


@here
def test_it_minds_no_defaults() -> None:
    sees = tree(50, 6)
    tensors = states(4, 2, sees, 64)
    expected = by_us(*tensors, sees)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(by_us(*tensors, sees), expected)
            assert attention._comes_out.__wrapped__(BF16, 64, 1) == attends(BF16, 64)
    finally:
        torch.set_default_dtype(torch.float32)


def test_heads_of_odd_sizes_are_left_alone() -> None:
    assert not attends(BF16, 12)
