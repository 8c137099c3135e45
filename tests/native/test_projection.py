"""Projections by code of our own: what they come to, and to which bits."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.functional import linear

from selfspec.native import project, projection, projects
from selfspec.native.kernel import compiled

HALVES = [torch.bfloat16, torch.float16]

here = pytest.mark.skipif(
    projection._kernel(torch.bfloat16) is None,
    reason="nothing can be compiled, or run by torch's threads",
)


def needs_torchs_order(dtype: torch.dtype) -> None:
    if not projects(dtype, 64):
        pytest.skip(f"torch adds up {dtype} in another way here")


def numbers(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)).to(dtype)


@here
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 64), (1, 1, 64), (2, 3, 64), (0, 64)])
def test_it_is_linear(shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype) -> None:
    """On any CPU, in the same layout."""
    weight = numbers(37, 64, dtype)
    bias = numbers(1, 37, dtype)[0] if has_bias else None
    x = numbers(max(shape[0], 1), 640, dtype).flatten()[: torch.Size(shape).numel()].view(shape)
    expected, found = linear(x, weight, bias), project(x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 14, 70])
@pytest.mark.parametrize("size", [64, 576, 1536])
def test_it_is_torchs_to_the_bit(size: int, num_tokens: int, dtype: torch.dtype) -> None:
    needs_torchs_order(dtype)
    tokens = numbers(num_tokens, size, dtype)
    tokens[:, ::9] *= 40  # as a few features of most models are
    weight = numbers(333, size, dtype)
    for bias in (None, weight[:, 0].contiguous()):
        alone = torch.cat([linear(token[None], weight, bias) for token in tokens])
        assert torch.equal(project(tokens, weight, bias), alone)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_where_all_but_the_order_of_sums_cancels_out(dtype: torch.dtype) -> None:
    needs_torchs_order(dtype)
    weight, tokens = numbers(3000, 320, dtype), numbers(6, 320, dtype)
    weight, tokens = torch.cat([weight, -weight], 1), torch.cat([tokens, tokens], 1)
    places = torch.randperm(640, generator=torch.Generator().manual_seed(0))
    weight, tokens = weight[:, places].contiguous(), tokens[:, places].contiguous()
    assert torch.equal(project(tokens, weight, None), linear(tokens, weight))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-40, -0.0])
def test_odd_numbers_come_out_as_torchs(odd: float, dtype: torch.dtype) -> None:
    needs_torchs_order(dtype)
    weight, tokens = numbers(40, 128, dtype), numbers(3, 128, dtype)
    tokens[1, 5] = odd
    weight[7, 9] = odd
    found, expected = project(tokens, weight, None), linear(tokens, weight)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@here
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads(num_threads: int) -> None:
    weight, tokens = numbers(50, 64, torch.bfloat16), numbers(2, 64, torch.bfloat16)
    expected, before = project(tokens, weight, None), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(project(tokens, weight, None), expected)
    finally:
        torch.set_num_threads(before)


@here
def test_several_callers_at_once() -> None:
    weight = numbers(300, 64, torch.bfloat16)
    inputs = [numbers(n, 64, torch.bfloat16) for n in range(1, 9)]
    expected = [project(x, weight, None) for x in inputs]
    found: dict[int, bool] = {}

    def ask(place: int) -> None:
        again = (project(inputs[place], weight, None) for _ in range(50))
        found[place] = all(torch.equal(one, expected[place]) for one in again)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(8), True)


@here
def test_what_lies_apart_in_memory_is_read_right() -> None:
    weight = numbers(24, 64, torch.bfloat16)
    whole = numbers(3, 128, torch.bfloat16)
    for x in (whole[:, ::2], whole.t()[:64].t(), whole[:1, :64].expand(4, 64)):
        assert torch.equal(project(x, weight, None), project(x.contiguous(), weight, None))


@here
def test_what_stock_converts_or_refuses_is_left_to_stock() -> None:
    weight, x = numbers(24, 64, torch.bfloat16), numbers(3, 64, torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        project(x.float(), weight, None)
    with pytest.raises(RuntimeError, match="shapes"):
        project(x[:, :32], weight, None)
    with torch.autocast("cpu", torch.float16):
        assert project(x, weight, None).dtype is torch.float16


@here
def test_few_rows_are_torchs() -> None:
    weight, x = numbers(7, 64, torch.bfloat16), numbers(3, 64, torch.bfloat16)
    assert torch.equal(project(x, weight, None), linear(x, weight))


@here
def test_rows_of_odd_sizes_are_torchs() -> None:
    assert not projects(torch.bfloat16, 96)
    weight, x = numbers(24, 96, torch.bfloat16), numbers(3, 96, torch.bfloat16)
    assert torch.equal(project(x, weight, None), linear(x, weight))


def test_only_half_precision() -> None:
    assert not projects(torch.float32, 64)
    assert not projects(torch.float64, 64)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("projection_code", "LANES", 32),
        (
            "code.Code",
            "fused",
            lambda code, one, other, sum_: code.fadd(code.fsub(one, other), sum_),
        ),
        ("code.Code", "write_half", lambda *_: None),
    ],
)
def test_the_trial_finds_what_is_otherwise(
    where: str, name: str, value: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_torchs_order(dtype)
    from selfspec.native import projection_code

    monkeypatch.setattr(f"selfspec.native.{where}.{name}", value)
    changed = compiled(lambda: projection_code.projection_code(dtype))
    monkeypatch.setattr(projection, "_kernel", lambda _dtype: changed)
    assert not projection._comes_out.__wrapped__(dtype)


def test_it_minds_no_defaults() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = projection._comes_out.__wrapped__(torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == projects(torch.bfloat16, 64)
