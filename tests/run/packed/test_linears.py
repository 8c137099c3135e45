"""A packed layer computes what the layer computes, and a torch without packing is told apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.run.packed import linears
from selfspec.run.packed.linears import can_pack, pack, packed_bytes, packed_linear
from tests.fakes import packs_here

needs_packs = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-6}
SHAPES = [(16,), (1, 16), (5, 16), (1, 1, 16), (2, 3, 16), (70, 16)]


@needs_packs
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_it_is_the_same_layer(
    shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = nn.Linear(16, 24, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape[:-1], 32, dtype=dtype)[..., ::2]  # It lies apart in memory.
    straight = linear(x, module.weight, module.bias)
    ours = packed_linear(x, module.weight, module.bias, pack(module.weight))
    torch.testing.assert_close(ours, straight, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    assert (ours.shape, ours.stride()) == (straight.shape, straight.stride())


@needs_packs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_where_it_can_not_be_packed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "_tried", lambda asked: asked is torch.float32)
    module = nn.Linear(16, 24, dtype=dtype).requires_grad_(False)
    x = torch.randn(5, 16, dtype=dtype)
    assert can_pack(dtype)
    assert packed_bytes(module.weight) == 4 * module.weight.numel()
    ours = packed_linear(x, module.weight, module.bias, pack(module.weight))
    assert ours.dtype is dtype
    torch.testing.assert_close(ours, module(x), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@needs_packs
def test_what_stock_converts_is_left_to_stock() -> None:
    module, x = nn.Linear(16, 24).requires_grad_(False), torch.randn(3, 16)
    packed = pack(module.weight)
    with torch.autocast("cpu", torch.bfloat16):
        outcome = packed_linear(x, module.weight, module.bias, packed)
        assert outcome.dtype is torch.bfloat16
        assert torch.equal(outcome, module(x))
    with pytest.raises(RuntimeError, match="dtype"):
        packed_linear(x.double(), module.weight, module.bias, packed)


@pytest.fixture
def fresh() -> Iterator[None]:
    linears._tried.cache_clear()
    yield
    linears._tried.cache_clear()


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, RuntimeError, TypeError])
def test_a_torch_without_the_private_operators_packs_nothing(
    error: type[Exception], fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be gone, renamed, or want other arguments in another version."""

    def gone(_weight: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(linears, "_reordered", gone)
    assert not any(can_pack(dtype) for dtype in ROUNDING)


def test_operators_that_compute_something_else_are_not_used(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "_reordered", lambda weight: weight)
    monkeypatch.setattr(linears, "_product", lambda x, packed, bias: x)
    assert not can_pack(torch.float32)


def test_trying_leaves_the_random_stream_alone(fresh: None) -> None:
    before = torch.get_rng_state()
    can_pack(torch.bfloat16)
    assert torch.equal(before, torch.get_rng_state())
