"""Sums in float32 are rounded to the halves that torch's own code comes to."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from selfspec import settled
from selfspec.settled import Part, counts_alone, settle

HALVES = [torch.bfloat16, torch.float16]


def lengths_of(weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32)


def sums_of(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Added up in another order than torch does for half precision."""
    return tokens.flip(-1).float() @ weight.flip(-1).float().t()


def needs_counting_alone(dtype: torch.dtype) -> None:
    if not counts_alone(dtype):
        pytest.skip(f"this CPU computes tokens in {dtype} by several at once")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 21])
@pytest.mark.parametrize("size", [8, 100, 640])
def test_what_comes_out_is_torchs_own_to_the_bit(
    size: int, num_tokens: int, has_bias: bool, dtype: torch.dtype
) -> None:
    needs_counting_alone(dtype)
    torch.manual_seed(size)
    tokens, weight = torch.randn(num_tokens, size).to(dtype), torch.randn(700, size).to(dtype)
    tokens[:, ::9] *= 40  # as a few features of most models are
    bias = torch.randn(700).to(dtype) if has_bias else None
    found = settle(sums_of(tokens, weight), tokens, [Part(weight, bias)], lengths_of(weight))
    alone = torch.cat([linear(token[None], weight, bias) for token in tokens])
    assert found.dtype is dtype
    assert torch.equal(found, alone)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_several_weights_of_one_input(dtype: torch.dtype) -> None:
    needs_counting_alone(dtype)
    torch.manual_seed(0)
    tokens, weight = torch.randn(9, 64).to(dtype), torch.randn(300, 64).to(dtype)
    bias = torch.randn(40).to(dtype)
    parts = [Part(weight[:50], None), Part(weight[50:90], bias), Part(weight[90:], None)]
    found = settle(sums_of(tokens, weight), tokens, parts, lengths_of(weight))
    assert torch.equal(found, torch.cat([linear(tokens, *part) for part in parts], dim=-1))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_only_what_lies_near_to_where_rounding_turns_is_asked_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any CPU: sums in the middle between two halves, and others."""
    asked: list[torch.Tensor] = []

    def note(tokens: torch.Tensor, weight: torch.Tensor, _bias: object) -> torch.Tensor:
        asked.append(weight[:, 0])
        return torch.full((len(tokens), len(weight)), 7.0, dtype=dtype)

    monkeypatch.setattr(settled, "linear", note)
    step = torch.finfo(dtype).eps
    sums = torch.tensor([[1.0, 1 + step / 2, 1 + step / 4, -1 - step / 2 * (1 + 1e-5), 2.0]])
    weight = torch.arange(5.0)[:, None].repeat(1, 3).to(dtype)  # each row holds its own number
    tokens, lengths = torch.full((1, 3), 0.5, dtype=dtype), torch.full((5,), 0.5)
    found = settle(sums, tokens, [Part(weight[:2], None), Part(weight[2:], None)], lengths)
    assert torch.cat(asked).tolist() == [1, 3]
    assert found.tolist() == [[1.0, 7.0, 1.0, 7.0, 2.0]]


def test_sums_that_are_no_numbers_are_torchs_own_matter() -> None:
    weight, tokens = torch.ones(3, 4).bfloat16(), torch.tensor([[torch.inf, 1, 1, 1]]).bfloat16()
    weight[1, 0] = 0
    found = settle(sums_of(tokens, weight), tokens, [Part(weight, None)], lengths_of(weight))
    assert torch.equal(found.isnan(), linear(tokens, weight).isnan())
    assert torch.equal(found.isinf(), linear(tokens, weight).isinf())


def test_whether_tokens_count_alone_leaves_the_random_stream_as_it_was() -> None:
    counts_alone.cache_clear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert {counts_alone(dtype) for dtype in HALVES} <= {True, False}
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_kept_for_gradients() -> None:
    module = torch.nn.Linear(64, 300).bfloat16()
    tokens = torch.randn(20, 64).bfloat16()
    sums = sums_of(tokens, module.weight.detach())
    part = Part(module.weight, module.bias)
    assert not settle(sums, tokens, [part], lengths_of(module.weight.detach())).requires_grad
