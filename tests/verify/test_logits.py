"""What is read off logits is what torch reads off them, ties and oddities included."""

from __future__ import annotations

import pytest
import torch

from selfspec.learning import top_k_of
from selfspec.verify import logits as module
from selfspec.verify.logits import likeliest, top_k

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=[1, 1 << 14], ids=["in blocks", "at once"])
def least_vocabulary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "_LEAST_VOCABULARY", request.param)
    return request.param


def some(num_tokens: int, dtype: torch.dtype = torch.float32, *places: int) -> torch.Tensor:
    torch.manual_seed(num_tokens)
    return torch.randn(*(places or (2, 3)), num_tokens).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 640, 1000, 1023])
@pytest.mark.parametrize("k", [1, 4, 8, 20])
@pytest.mark.usefixtures("least_vocabulary")
def test_the_k_likeliest_and_their_probabilities(
    k: int, num_tokens: int, dtype: torch.dtype
) -> None:
    logits = some(num_tokens, dtype)
    ids, probabilities = top_k(logits, k)
    expected = logits.float().softmax(-1).topk(min(k, num_tokens)).values
    assert ids.shape == probabilities.shape == expected.shape
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities, expected)
    torch.testing.assert_close(logits.float().softmax(-1).gather(-1, ids), expected)
    assert all(len(set(row)) == len(row) for row in ids.flatten(0, 1).tolist())


@pytest.mark.usefixtures("least_vocabulary")
def test_equal_ones_come_once_each() -> None:
    ids, _ = top_k(torch.zeros(1, 640), 8)
    assert len(set(ids[0].tolist())) == 8


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.usefixtures("least_vocabulary")
def test_where_a_number_is_none_the_tables_know_nothing(value: float) -> None:
    logits = some(700, torch.float32, 2)
    logits[0, 300] = value
    ids, probabilities = top_k_of(logits, 4)
    assert len(set(ids[0].tolist())) == 4
    assert all(0 <= id_ < 700 for id_ in ids[0])
    assert probabilities[0].tolist() == [0.0] * 4
    assert top_k_of(logits[1:], 4).ids.tolist() == ids[1:].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = some(33, dtype)
    assert torch.equal(likeliest(logits), logits.float().argmax(-1))
    assert likeliest(torch.ones(1, 1, 7, dtype=dtype)).tolist() == [[0]]


def test_what_rounds_alike_is_a_tie() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert likeliest(logits).tolist() == [0]
