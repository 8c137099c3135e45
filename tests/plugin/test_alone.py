"""Each query by itself, over its own keys in line: what it sees, and what it comes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from selfspec.plugin import alone
from selfspec.plugin.alone import (
    Keys,
    attend_alone,
    goes_native,
    rows_in,
    rows_that_see_all,
)
from selfspec.settled import counts_alone

COLUMNS = 29


def mask_of(seen: list[list[list[int]]]) -> torch.Tensor:
    """(B, 1, Q, columns) of the columns that each row's queries see."""
    mask = torch.full((len(seen), 1, len(seen[0]), COLUMNS), torch.finfo(torch.float32).min)
    for row, queries in enumerate(seen):
        for query, columns in enumerate(queries):
            mask[row, 0, query, columns] = 0
    return mask


def keys_in(mask: torch.Tensor, window: int | None) -> list[Keys]:
    return [keys for row in rows_in(mask, window) for keys in row.keys]


def test_a_chain_takes_no_copy() -> None:
    mask = mask_of([[list(range(20)), list(range(21))]])
    states = torch.randn(1, 2, COLUMNS, 4)
    for end, keys in zip((20, 21), keys_in(mask, None), strict=True):
        assert (keys.others, keys.mask) == (None, None)
        taken = keys.taken_from(states)
        assert taken.data_ptr() == states.data_ptr()
        assert torch.equal(taken, states[:, :, :end])


@pytest.mark.parametrize("is_bool", [True, False])
def test_what_lies_apart_comes_behind(is_bool: bool) -> None:
    mask = mask_of([[[*range(20), 22, 25]], [[*range(18), 20]]])
    first, second = keys_in(mask == 0 if is_bool else mask, None)
    states = torch.randn(2, 2, COLUMNS, 4)
    assert torch.equal(first.taken_from(states), states[:1, :, [*range(20), 22, 25]])
    assert torch.equal(second.taken_from(states), states[1:, :, [*range(18), 20]])
    assert (first.mask, second.mask) == (None, None)


def test_padding_stays_and_is_hidden_in_every_row() -> None:
    padded, whole = keys_in(mask_of([[[*range(3, 20), 22]], [[*range(20), 21]]]), None)
    assert padded.taken_from(torch.zeros(2, 1, COLUMNS, 4)).shape[2] == 21
    assert padded.mask is not None
    assert padded.mask[0, 0, 0].tolist() == [False] * 3 + [True] * 18
    assert whole.mask is not None
    assert whole.mask.all()


@pytest.mark.parametrize(("window", "num_keys"), [(18, 18), (19, 21), (None, 21)])
def test_what_has_left_its_window_is_gone(window: int | None, num_keys: int) -> None:
    (keys,) = keys_in(mask_of([[[*range(3, 20), 22]]]), window)
    taken = keys.taken_from(torch.zeros(1, 1, COLUMNS, 4))
    assert taken.shape[2] == num_keys
    assert keys.mask is not None
    assert keys.mask.shape[-1] == num_keys
    assert int(keys.mask.sum()) == 18


def tensors(num_sharing: int, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(num_sharing)
    module = SimpleNamespace(num_key_value_groups=num_sharing, is_causal=True)
    query = torch.randn(2, 3, 2 * num_sharing, 8).transpose(1, 2)
    key, value = torch.randn(2, 2, 2, COLUMNS, 8)
    return module, *(tensor.to(dtype) for tensor in (query, key, value))


SEEN = [[[*range(20)], [*range(20), 22], [*range(20), 22, 24]], [[5, 6], [5, 6, 9], [5, 6, 9, 23]]]


@pytest.mark.parametrize("num_sharing", [1, 3])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_it_comes_to_what_a_mask_does(scaling: float | None, num_sharing: int) -> None:
    module, query, key, value = tensors(num_sharing, torch.float32)
    mask = mask_of(SEEN)
    shared = (each.repeat_interleave(num_sharing, dim=1) for each in (key, value))
    expected = scaled_dot_product_attention(query, *shared, attn_mask=mask, scale=scaling)
    found = attend_alone(module, query, key, value, rows_in(mask, None), scaling=scaling)
    assert found.shape == (2, 3, 2 * num_sharing, 8)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_sharing", [1, 3])
def test_it_is_a_plain_steps_outcome_to_the_bit(
    num_sharing: int, dtype: torch.dtype, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counts_alone(dtype):
        pytest.skip(f"this CPU computes tokens in {dtype} by several at once")
    if not is_native:
        monkeypatch.setattr(alone, "attends", lambda _dtype, _dim: False)
    module, query, key, value = tensors(num_sharing, dtype)
    row = slice(1)
    found = attend_alone(module, query[row], key[row], value[row], rows_in(mask_of(SEEN[:1]), None))
    for place, columns in enumerate(SEEN[0]):
        one = query[row, :, place : place + 1]
        plain, _ = sdpa_attention_forward(
            module, one, key[row][:, :, columns], value[row][:, :, columns], None
        )
        assert torch.equal(found[:, place : place + 1], plain)


def test_where_stock_has_a_mask_each_is_asked_by_itself() -> None:
    seen = [[[*range(20)], [*range(20), 22]], [[*range(3, 20)], [*range(3, 20), 22]]]
    assert [row.lines for row in rows_in(mask_of(seen), None)] == [None, None]
    (row,) = rows_in(mask_of(seen[:1]), None)
    assert row.lines is not None
    assert row.lines.columns.tolist() == [[*range(20), 0], [*range(20), 22]]


def test_of_a_plain_step_all_is_seen() -> None:
    first, second = rows_that_see_all(2, 5)
    for number, row in enumerate((first, second)):
        assert row.keys == [Keys(number, 0, 0, 5, None, None)]
        assert row.lines is not None
        assert row.lines.columns.tolist() == [[0, 1, 2, 3, 4]]


@pytest.fixture
def always_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "attends", lambda _dtype, _dim: True)


@pytest.mark.usefixtures("always_exact")
def test_what_never_goes_native() -> None:
    query, key, value = (torch.zeros(1, 2, size, 8, dtype=torch.bfloat16) for size in (3, 5, 5))
    assert goes_native(query, key, value, 0.0)
    assert not goes_native(query, key, value, 0.1)
    assert not goes_native(query, key.half(), value, 0.0)
    assert not goes_native(query, key, value[..., :4], 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert not goes_native(query, key, value, 0.0)


@pytest.mark.usefixtures("always_exact")
def test_a_single_head_does_not_either() -> None:
    """torch then adds up in several threads, in another order."""
    query, key, value = (torch.zeros(2, 1, 4, 8, dtype=torch.bfloat16) for _ in range(3))
    assert not goes_native(query, key, value, 0.0)
