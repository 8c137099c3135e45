"""Rounded weights: products near the weight's own, and the same bits for a token in every width."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import linear

from selfspec.weights import rounded
from selfspec.weights.rounded import products_of_a_step, round_weight, rounding_reason

BOTH = [bits for bits in (8, 4) if rounding_reason(bits) is None]
SHAPES = [(32, 48), (64, 32), (128, 96), (192, 576), (1100, 1024), (1088, 1024)]
pytestmark = pytest.mark.skipif(len(BOTH) < 2, reason="torch has no such products here")


def matrix(bits, num_out=128, num_in=96):
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in)
    return weight, round_weight(weight, bits)


@pytest.mark.parametrize("bits", BOTH)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_rounded_weight(bits, shape, dtype):
    weight, made = matrix(bits, *shape)
    values, bias = made.unpacked(), torch.randn(shape[0], dtype=dtype)
    steps = 15 if made.bits == 4 else 254
    assert made.bits == (4 if bits == 4 and shape[0] % 64 == shape[1] % 32 == 0 else 8)
    assert (values - weight).abs().max() < 1.1 * weight.abs().max() * 2 / steps
    x = torch.randn(3, 40, shape[1]).bfloat16()
    straight = linear(x.double(), values.double())
    for part, exact in ((x, straight), (x[:, :5], straight[:, :5]), (x[0, 0], straight[0, 0])):
        outcome = made(part.to(dtype), bias)
        assert (outcome.dtype, outcome.shape) == (dtype, exact.shape)
        off = (outcome.double() - bias.double() - exact).abs().max()
        assert off < 0.02 * exact.abs().max()


@pytest.mark.parametrize("bits", BOTH)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_of_a_step_has_the_same_bits_at_every_width(bits, shape):
    _, made = matrix(bits, *shape)
    x = torch.randn(1, 150, shape[1])
    alone = torch.cat([made(x[:, [token]], None) for token in range(150)], 1)
    with products_of_a_step():
        for width in (1, 2, 3, 4, 5, 8, 16, 17, 31, 64, 65, 150):
            assert torch.equal(made(x[:, :width], None), alone[:, :width])
    rows = x.view(150, 1, -1)  # A plain step of many texts
    assert torch.equal(made(rows, None).view(1, 150, -1), alone)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_instructions_pass_too(capability):
    """Torch chooses them when it is imported. They pack 4 bits in other orders."""
    if capability == "avx2" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor's own instructions are tested already")
    tests = f"{__file__}::test_products_are_those_of_the_rounded_weight"
    more = f"{__file__}::test_a_token_of_a_step_has_the_same_bits_at_every_width"
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not shape4", tests, more]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_weights_on_a_grid_of_4_bits_are_kept(scale):
    """Of files in 4 bits: the number farthest from zero is -8 in each group of 32."""
    numbers = torch.randint(-7, 8, (64, 4, 32)).float()
    numbers[..., 3] = -8
    weight = (numbers * torch.tensor(scale).bfloat16().float()).view(64, 128)
    assert torch.equal(round_weight(weight, 4).unpacked(), weight)


@pytest.mark.parametrize("bits", BOTH)
def test_zeros_stay_zeros_and_large_values_finite(bits):
    weight = torch.zeros(64, 64)
    weight[3] = 1e30
    weight[5, 7] = -1e-35
    values = round_weight(weight, bits).unpacked()
    assert not values[0].any()
    torch.testing.assert_close(values[3], weight[3], rtol=0.01, atol=0)
    assert values.isfinite().all()


def test_what_torch_would_crash_with_is_left_as_it_is():
    assert round_weight(torch.randn(64, 50), 8) is None
    assert round_weight(torch.randn(64, 50), 4) is None


def test_a_build_without_the_products_says_so(monkeypatch):
    def missing(*_: object) -> None:
        raise AttributeError

    monkeypatch.setattr(rounded, "int4_product", missing)
    rounding_reason.cache_clear()
    try:
        assert rounding_reason(8) is None
        assert f"torch {torch.__version__} has no product" in rounding_reason(4)
    finally:
        rounding_reason.cache_clear()
