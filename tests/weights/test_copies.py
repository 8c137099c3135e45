"""A packed layer computes what the layer computes, and a torch without packing is told apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.errors import UnsupportedError
from selfspec.weights import copies
from selfspec.weights.copies import PackedWeight, pack_all, packed_linear, ways_for
from tests.fakes import packs_here

needs_packs = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-6}
HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(16,), (1, 16), (5, 16), (1, 1, 16), (2, 3, 16), (70, 16)]


def needs(way: str, dtype: torch.dtype) -> None:
    """Skips a test where this machine's torch has no such copies."""
    if not copies._is_right(way, dtype):
        pytest.skip(f"this build of torch has no {way} copies of {dtype}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("same", dtype) for dtype in ROUNDING] + [("float16", dtype) for dtype in HALVES],
)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_it_is_the_same_layer(shape, has_bias, name, dtype):
    torch.manual_seed(0)
    needs(name, dtype)
    module = nn.Linear(16, 24, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape[:-1], 32, dtype=dtype)[..., ::2]  # It lies apart in memory.
    straight = linear(x, module.weight, module.bias)
    ours = packed_linear(x, module.weight, module.bias, pack_all(name, [module.weight])[0])
    torch.testing.assert_close(ours, straight, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    assert (ours.shape, ours.stride()) == (straight.shape, straight.stride())


def test_float16_copies_of_bfloat16_are_exact_down_to_tiny_weights():
    """Products with a unit vector read the weights back."""
    needs("float16", torch.bfloat16)
    powers = torch.arange(-34.0, 1.0)
    weight = (1.75 * 2**powers).to(torch.bfloat16)[:, None].expand(-1, 16).contiguous()
    for factor in (2.0**-60, 1.0, 3.0, 2.0**60):
        scaled = (weight * factor).contiguous()
        (copy,) = pack_all("float16", [scaled])
        unit = torch.zeros(1, 16, dtype=torch.bfloat16)
        unit[0, 0] = 1
        read = copy(unit, None)[0]
        assert torch.equal(read[5:], scaled[5:, 0])
        assert (read[:5] - scaled[:5, 0]).abs().max() <= 2.0**-32 * scaled.max()


def test_a_large_weight_is_packed_in_parts(monkeypatch):
    needs("float16", torch.bfloat16)
    weights = [torch.randn(rows, 16).bfloat16() for rows in (24, 100, 7)]
    x = torch.randn(3, 16).bfloat16()
    whole = [copy(x, None) for copy in pack_all("float16", weights)]
    monkeypatch.setattr(copies, "_PART", 16 * 30)
    parts = pack_all("float16", weights)
    assert [len(copy._parts) for copy in parts] == [1, 4, 1]  # type: ignore[attr-defined]
    assert all(torch.equal(copy(x, None), w) for copy, w in zip(parts, whole, strict=True))


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_get_no_float16_copy(odd):
    needs("float16", torch.bfloat16)
    finite, weight = torch.ones(2, 8, 8, dtype=torch.bfloat16)
    weight[3, 4] = odd
    none, copy = pack_all("float16", [weight, finite])
    assert none is None
    assert copy is not None
    assert torch.equal(copy(finite, None), linear(finite, finite))


@needs_packs
def test_what_stock_converts_is_left_to_stock():
    module, x = nn.Linear(16, 24).requires_grad_(False), torch.randn(3, 16)
    (copy,) = pack_all(ways_for(torch.float32)[0], [module.weight])
    with torch.autocast("cpu", torch.bfloat16):
        outcome = packed_linear(x, module.weight, module.bias, copy)
        assert outcome.dtype is torch.bfloat16
        assert torch.equal(outcome, module(x))
    with pytest.raises(RuntimeError, match="dtype"):
        packed_linear(x.double(), module.weight, module.bias, copy)


@pytest.fixture
def fresh() -> Iterator[None]:
    copies._is_right.cache_clear()
    yield
    copies._is_right.cache_clear()


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, RuntimeError, TypeError])
def test_a_torch_without_the_private_operators_packs_nothing(error, fresh, monkeypatch):
    """They may be gone, renamed, or want other arguments in another version."""

    def gone(_weight: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(copies, "reordered", gone)
    monkeypatch.setattr(copies, "float16_packed", gone)
    assert not any(ways_for(dtype) for dtype in ROUNDING)


def test_operators_that_compute_something_else_are_not_used(fresh, monkeypatch):
    monkeypatch.setattr(copies, "reordered", lambda weight: weight)
    monkeypatch.setattr(copies, "reordered_product", lambda x, packed, bias: x)
    monkeypatch.setattr(copies, "float16_product", lambda x, packed: x)
    assert not ways_for(torch.float32)
    assert not ways_for(torch.bfloat16)


@pytest.mark.parametrize("name", ["same", "float16"])
@pytest.mark.parametrize("dtype", [*ROUNDING], ids=str)
def test_a_packed_weight_is_given_back_bit_by_bit(name, dtype):
    if name not in ways_for(dtype):
        pytest.skip(f"this build of torch has no {name} copies of {dtype}")
    weight, x = torch.randn(24, 16, dtype=dtype), torch.randn(3, 16, dtype=dtype)
    module = nn.Linear(16, 24, bias=False, dtype=dtype).requires_grad_(False)
    (copy,) = pack_all(name, [weight])
    assert copy is not None
    packed = module.weight = PackedWeight.of(weight, copy, None)
    assert (packed.shape, packed.dtype, packed.numel()) == (weight.shape, dtype, 24 * 16)
    assert not packed.requires_grad
    assert torch.equal(module(x), copy(x, None))
    assert torch.equal(module(x[0]), copy(x[:1], None)[0])
    assert type(module.weight) is PackedWeight
    assert torch.equal(torch.cat([packed, weight]), torch.cat([weight, weight]))
    assert type(packed) is nn.Parameter
    assert torch.equal(module(x), linear(x, weight))


def set_data(weight: nn.Parameter, values: torch.Tensor) -> None:
    weight.data = values


@needs_packs
def test_a_packed_weight_that_is_kept_is_read_as_a_copy_and_is_not_written():
    weight = torch.randn(24, 16)
    (copy,) = pack_all("same", [weight])
    assert copy is not None
    packed = PackedWeight.of(weight, copy, "it can't be written")
    assert torch.equal(packed.detach(), weight)
    assert torch.equal(torch.cat([packed, packed]), torch.cat([weight, weight]))
    for write in (lambda: set_data(packed, weight), packed.zero_, lambda: packed.__imul__(2)):
        with pytest.raises(UnsupportedError, match="it can't be written"):
            write()
    assert type(packed) is PackedWeight
    assert torch.equal(linear(weight, packed, None), copy(weight, None))
