"""A packed matrix computes what the weight computes; a torch without packing is told apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.weights import formats
from selfspec.weights.formats import Packer, pack_float16, packer_for, reorder
from selfspec.weights.held_weight import hold
from tests.fakes import packs_here

needs_packs = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-6}
HALVES = [torch.bfloat16, torch.float16]
_PACKINGS = [(reorder, dtype) for dtype in ROUNDING] + [(pack_float16, dtype) for dtype in HALVES]
# By name, since every process of pytest-xdist has functions at addresses of its own.
PACKINGS = [pytest.param(*pair, id=f"{pair[0].__name__}-{pair[1]}") for pair in _PACKINGS]
SHAPES = [(16,), (1, 16), (5, 16), (1, 1, 16), (2, 3, 16), (70, 16)]


def needs(packer: Packer, dtype: torch.dtype) -> None:
    """Skips a test where this machine's torch can't pack so."""
    if not formats._is_right(packer, dtype):
        pytest.skip(f"this build of torch has no {packer.__name__} for {dtype}")


def pack(module: nn.Linear, packer: Packer) -> None:
    (matrix,) = packer([module.weight.detach()])
    assert matrix is not None
    hold(module.weight, matrix, None)


@pytest.mark.parametrize(("packer", "dtype"), PACKINGS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_it_is_the_same_layer(shape, has_bias, packer, dtype):
    torch.manual_seed(0)
    needs(packer, dtype)
    module = nn.Linear(16, 24, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape[:-1], 32, dtype=dtype)[..., ::2]  # It lies apart in memory.
    straight = linear(x, module.weight, module.bias)
    pack(module, packer)
    ours = module(x)
    torch.testing.assert_close(ours, straight, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    assert (ours.shape, ours.stride()) == (straight.shape, straight.stride())


def test_float16_copies_of_bfloat16_are_exact_down_to_tiny_weights():
    """Products with a unit vector read the weights back."""
    needs(pack_float16, torch.bfloat16)
    powers = torch.arange(-34.0, 1.0)
    weight = (1.75 * 2**powers).to(torch.bfloat16)[:, None].expand(-1, 16).contiguous()
    for factor in (2.0**-60, 1.0, 3.0, 2.0**60):
        scaled = (weight * factor).contiguous()
        (copy,) = pack_float16([scaled])
        unit = torch.zeros(1, 16, dtype=torch.bfloat16)
        unit[0, 0] = 1
        read = copy(unit, None)[0]
        assert torch.equal(read[5:], scaled[5:, 0])
        assert (read[:5] - scaled[:5, 0]).abs().max() <= 2.0**-32 * scaled.max()


def test_a_large_weight_is_packed_in_parts(monkeypatch):
    needs(pack_float16, torch.bfloat16)
    weights = [torch.randn(rows, 16).bfloat16() for rows in (24, 100, 7)]
    x = torch.randn(3, 16).bfloat16()
    whole = [copy(x, None) for copy in pack_float16(weights)]
    monkeypatch.setattr(formats, "_PART", 16 * 30)
    parts = pack_float16(weights)
    assert [len(copy._parts) for copy in parts] == [1, 4, 1]  # type: ignore[attr-defined]
    assert all(torch.equal(copy(x, None), w) for copy, w in zip(parts, whole, strict=True))


@needs_packs
def test_what_stock_converts_is_left_to_stock():
    module, x = nn.Linear(16, 24).requires_grad_(False), torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
        pack(module, reorder)
        outcome = module(x)
        assert outcome.dtype is torch.bfloat16
        assert torch.equal(outcome, expected)
    pack(module, reorder)
    with pytest.raises(RuntimeError, match="dtype"):
        module(x.double())


@pytest.fixture
def fresh() -> Iterator[None]:
    packer_for.cache_clear()
    yield
    packer_for.cache_clear()


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, RuntimeError, TypeError])
def test_a_torch_without_the_private_operators_packs_nothing(error, fresh, monkeypatch):
    """They may be gone, renamed, or want other arguments in another version."""

    def gone(_weight: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(formats, "reordered", gone)
    monkeypatch.setattr(formats, "float16_packed", gone)
    assert not any(packer_for(dtype) for dtype in ROUNDING)


def test_operators_that_compute_something_else_are_not_used(fresh, monkeypatch):
    monkeypatch.setattr(formats, "reordered", lambda weight: weight)
    monkeypatch.setattr(formats, "reordered_product", lambda x, packed, bias: x)
    monkeypatch.setattr(formats, "float16_product", lambda x, packed: x)
    assert not packer_for(torch.float32)
    assert not packer_for(torch.bfloat16)
