"""A packed product is the same one, by itself and beside others of the same input."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec import packed
from selfspec.packed import (
    Group,
    Joint,
    Packed,
    groups_of,
    pack,
    packed_bytes,
    packed_dtype,
    packed_ways,
)
from tests.fakes import packs_here

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")

SHAPES = [(16,), (1, 16), (5, 16), (1, 1, 16), (2, 3, 16), (70, 16)]
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_it_is_the_same_product_too(
    shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = nn.Linear(16, 24, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape[:-1], 32, dtype=dtype)[..., ::2]  # lies apart in memory
    straight = linear(x, module.weight, module.bias)
    other = Packed(pack([module.weight]), dtype)(x, module.weight, module.bias)
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(other, straight, rtol=rounding, atol=rounding)
    assert (other.shape, other.stride()) == (straight.shape, straight.stride())


@pytest.fixture
def no_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that can't calculate in half precision."""
    monkeypatch.setattr(packed, "packed_dtype", lambda dtype: torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_wider_copy_gives_what_half_precision_gives(
    has_bias: bool, dtype: torch.dtype, no_halves: None
) -> None:
    attention = Attention(bias=has_bias, dtype=dtype)
    group, x = attention.group(), torch.randn(5, 16, dtype=dtype)
    ways = packed_ways({group: pack([module.weight for module in group])})
    for module in group:
        expected = module(x)
        found = ways[module](x, module.weight, module.bias)
        torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
        assert (found.dtype, found.stride()) == (dtype, expected.stride())
    assert packed_bytes(group) == 4 * sum(module.weight.numel() for module in group)


def test_only_half_precision_may_need_a_wider_copy() -> None:
    assert packed_dtype(torch.float32) is torch.float32
    assert packed_dtype(torch.float64) is torch.float64
    for dtype in (torch.bfloat16, torch.float16):
        module = nn.Linear(16, 24, dtype=dtype)
        size = packed_dtype(dtype).itemsize
        assert size in (2, 4)
        assert packed_bytes((module,)) == size * 16 * 24


def test_what_stock_converts_is_left_to_stock() -> None:
    module = nn.Linear(16, 24).requires_grad_(False)
    way, x = Packed(pack([module.weight]), torch.float32), torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        outcome = way(x, module.weight, module.bias)
        assert outcome.dtype is torch.bfloat16
        assert torch.equal(outcome, module(x))
    with pytest.raises(RuntimeError, match="dtype"):
        way(x.double(), module.weight, module.bias)


class Attention(nn.Module):
    """Five projections of two inputs, and one that has an input of its own."""

    def __init__(self, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        of = {"bias": bias, "dtype": dtype}
        self.k_proj = nn.Linear(16, 8, **of)
        self.q_proj = nn.Linear(16, 24, **of)
        self.v_proj = nn.Linear(16, 9, **of)
        self.gate_proj = nn.Linear(16, 12, **of)
        self.up_proj = nn.Linear(16, 12, **of)
        self.o_proj = nn.Linear(24, 16, **of)
        self.requires_grad_(False)

    def group(self) -> Group:
        return self.q_proj, self.k_proj, self.v_proj


def joint_of(group: Group) -> Joint:
    return Joint(pack([module.weight for module in group]), group)


def ask(joint: Joint, group: Group, place: int, x: torch.Tensor) -> torch.Tensor:
    return joint.way(place)(x, group[place].weight, group[place].bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_together_they_are_the_same_products(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    group = Attention(bias=bias, dtype=dtype).group()
    joint = joint_of(group)
    for x in torch.randn(2, *shape, dtype=dtype):
        for place, module in enumerate(group):
            outcome, straight = ask(joint, group, place, x), module(x)
            rounding = ROUNDING[dtype]
            torch.testing.assert_close(outcome, straight, rtol=rounding, atol=rounding)
            assert outcome.is_contiguous()


@pytest.fixture
def num_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of outcomes of each packed product."""
    asked: list[int] = []
    outcome_of = Packed.outcome

    def listen(self: Packed, *args: Any) -> torch.Tensor:
        outcome = outcome_of(self, *args)
        asked.append(outcome.shape[-1])
        return outcome

    monkeypatch.setattr(Packed, "outcome", listen)
    return asked


def test_the_first_one_is_asked_for_all(num_products: list[int]) -> None:
    group = Attention().group()
    joint, x = joint_of(group), torch.randn(2, 16)
    for place in (0, 1, 2):
        ask(joint, group, place, x)
    assert num_products == [24 + 8 + 9]
    assert joint._answers is None


def equal_but_another(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def written_to(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def seen_otherwise(x: torch.Tensor) -> torch.Tensor:
    return x[:1]


@pytest.mark.parametrize("change", [equal_but_another, written_to, seen_otherwise])
def test_another_input_is_answered_by_itself(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    group = Attention().group()
    joint, x = joint_of(group), torch.randn(2, 16)
    ask(joint, group, 0, x)
    other = change(x)
    assert torch.equal(ask(joint, group, 1, other), group[1](other))
    assert torch.equal(ask(joint, group, 2, other), group[2](other))


def test_in_another_order_each_is_answered() -> None:
    group = Attention().group()
    joint, x = joint_of(group), torch.randn(2, 16)
    for place in (1, 2, 0, 2, 1):
        torch.testing.assert_close(ask(joint, group, place, x), group[place](x))


def test_in_inference_mode_they_are_together_too(num_products: list[int]) -> None:
    group = Attention().group()
    joint = joint_of(group)
    with torch.inference_mode():
        x = torch.randn(2, 16)
        for place in (0, 1, 2):
            torch.testing.assert_close(ask(joint, group, place, x), group[place](x))
    assert len(num_products) == 1


def test_two_at_once_get_what_is_theirs() -> None:
    group = Attention().group()
    joint, wrong = joint_of(group), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            x = torch.randn(2, 16, generator=generator)
            for place, module in enumerate(group):
                if not torch.allclose(ask(joint, group, place, x), module(x), atol=1e-5):
                    wrong.append(place)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_those_of_one_input_are_found_together() -> None:
    model = nn.ModuleList([Attention(), Attention()])
    one, other = model
    modules = {m for m in model.modules() if isinstance(m, nn.Linear)}
    modules.remove(other.up_proj)  # small, say
    assert set(groups_of(model.modules(), modules)) == {
        one.group(),
        (one.gate_proj, one.up_proj),
        (one.o_proj,),
        other.group(),
        (other.gate_proj,),
        (other.o_proj,),
    }


def has_no_bias(model: Attention) -> None:
    model.v_proj = nn.Linear(16, 9, bias=False)


def has_another_input(model: Attention) -> None:
    model.v_proj = nn.Linear(12, 9)


def has_another_dtype(model: Attention) -> None:
    model.v_proj = nn.Linear(16, 9, dtype=torch.bfloat16)


@pytest.mark.parametrize("change", [has_no_bias, has_another_input, has_another_dtype])
def test_what_does_not_fit_together_is_left_apart(change: Callable[[Attention], None]) -> None:
    model = Attention()
    change(model)
    assert set(groups_of(model.modules(), model.group())) == {(module,) for module in model.group()}


def test_each_module_has_its_way() -> None:
    model = Attention()
    groups = [model.group(), (model.o_proj,)]
    ways = packed_ways({group: pack([m.weight for m in group]) for group in groups})
    assert set(ways) == {*model.group(), model.o_proj}
    x = torch.randn(3, 16)
    outcome = ways[model.q_proj](x, model.q_proj.weight, model.q_proj.bias)
    torch.testing.assert_close(outcome, model.q_proj(x))
    torch.testing.assert_close(
        ways[model.o_proj](outcome, model.o_proj.weight, model.o_proj.bias), model.o_proj(outcome)
    )
    assert torch.equal(
        ways[model.v_proj](2 * x, model.v_proj.weight, model.v_proj.bias),
        linear(2 * x, model.v_proj.weight, model.v_proj.bias),
    )
