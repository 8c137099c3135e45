"""Copies are of the weights as they are, made once that pays, shared, and fit the memory."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import prune

from selfspec.weights import Packing, copies
from selfspec.weights import packing as module
from selfspec.weights.copies import CopySlot, Origin, PackedMatrix, own_linear
from tests.fakes import fake_trials, packs_here
from tests.lossless.same import in_threads

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")

SIZE = 4 * 16 * 24  # bytes of a layer


@pytest.fixture
def all_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch)


@pytest.fixture
def model(all_pay: None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)).requires_grad_(False)


def packed(model: nn.Module, *, whatever_memory: bool = False) -> Packing:
    """A model's packing, with all layers packed."""
    packing = Packing.of(model)
    packing.pack(whatever_memory=whatever_memory)
    return packing


def held(packing: Packing) -> list[Any]:
    return [copy.held for copy in packing.copies.values()]


def test_another_thread_may_ask_while_layers_are_looked_at(model, monkeypatch):
    packing, asked = packed(model), []
    monkeypatch.setattr(module, "CopySlot", lambda: asked.append(packing.is_packed) or CopySlot())
    model.append(nn.Linear(24, 16).requires_grad_(False))
    packing.renew(model)
    assert set(asked) == {True}
    assert not packing.is_packed


def as_training_does(weight: torch.Tensor) -> None:
    weight.mul_(1.5)


def to_other_memory(weight: torch.Tensor) -> None:
    weight.data = 2 * weight.data


# The first rows are an identity: permuted both ways, all sums of rows and of columns stay. Of
# negated columns the topmost bit of an even number of words changes in each row and each column.
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda weight: weight.data[:2].copy_(weight.data[:2].flip(0)),
    "one index": lambda weight: weight.data[3, 5].add_(1e-3),
    "permuted within rows": lambda weight: weight.data.copy_(weight.data.roll(8, 1)),
    "permuted both ways": lambda weight: weight.data[:16].copy_(weight.data[:16].roll(2, 0)),
    "negated columns": lambda weight: weight.data[:, 1:5:2].neg_(),
    "as training does": as_training_does,
    "to other memory": to_other_memory,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_changed_is_packed_anew(model, change):
    x = torch.randn(3, 16)
    model[0].weight.data[:16] = torch.eye(16)
    packing = packed(model)
    before = held(packing)
    assert held(Packing.of(model)) == before
    change(model[0].weight)
    assert Packing.of(model) is packing
    assert [each is None for each in held(packing)] == [True, False]
    packing.before_forward(1)
    after = held(packing)
    assert after[0].copy is not before[0].copy
    assert after[1] is before[1]
    with packing.in_use():
        torch.testing.assert_close(
            model[0](x), linear(x, model[0].weight, model[0].bias), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(("num_forwards", "is_packed"), [(4, False), (5, True)])
def test_weights_that_changed_are_packed_once_that_pays(
    num_forwards, is_packed, model, monkeypatch
):
    """As in training, where they change between any two calls."""
    fake_trials(monkeypatch, saves=0.5, packing=2.5)
    packing = packed(model)
    for _ in range(8):
        packing.before_forward(1)
    for layer in model:
        as_training_does(layer.weight)
    assert Packing.of(model) is packing
    for _ in range(num_forwards):
        assert not packing.is_packed
        packing.before_forward(1)
    assert packing.is_packed == is_packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 15), (5, 16), (40, 6), (1, 17), (33, 34)], ids=str)
def test_every_value_that_changes_or_moves_is_seen(shape, dtype):
    whole = torch.randn(shape[0] * shape[1] + 3, dtype=dtype)
    weight = whole[3:].view(shape)  # Its first value lies at an odd place.
    origin, kept = Origin.of(weight), weight.clone()
    assert Origin.of(weight) == origin
    for row, column in ((0, 0), (-1, -1), (shape[0] // 2, 1)):
        weight.data[row, column] *= -1
        assert Origin.of(weight) != origin
        weight.data[row, column] *= -1
    for dim, size in enumerate(shape):
        for distance in range(1, size):
            weight.data.copy_(kept.roll(distance, dim))
            assert Origin.of(weight) != origin
    weight.data.copy_(kept)
    assert Origin.of(weight) == origin
    assert Origin.of(weight.clone()) != origin


def transposed(module: nn.Linear) -> None:
    module.weight.data = torch.randn(16, 24).T


GONE: dict[str, Callable[[nn.Module], Any]] = {
    "on meta": lambda module: module.to("meta"),
    "transposed": transposed,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.9),
    "float64": lambda module: module.double(),
}


@pytest.mark.parametrize("change", GONE.values(), ids=GONE)
def test_the_copy_of_a_weight_that_is_no_longer_packed_is_dropped(model, change):
    packing = packed(model)
    change(model[0])
    Packing.of(model)
    assert packing.copies[model[0]].held is None
    x = torch.ones(3, 16, dtype=model[0].weight.dtype, device=model[0].weight.device)
    expected = model[0](x)
    with packing.in_use():
        assert model[0](x).device == x.device
        if x.device.type == "cpu":
            assert torch.equal(model[0](x), expected)


@pytest.mark.parametrize("change", [as_training_does, to_other_memory])
def test_a_weight_that_changes_during_a_call_is_used_itself(model, change):
    packing, x = packed(model), torch.ones(3, 16)
    with packing.in_use():
        change(model[0].weight)
        assert torch.equal(model[0](x), linear(x, model[0].weight, model[0].bias))


def test_a_weight_that_can_no_longer_be_packed_ends_no_call(model, monkeypatch):
    """As one with a NaN, of which there is no float16 copy."""
    really = module.pack_all
    packed(model)

    def pack_all(way: str, of: list[torch.Tensor]) -> list[PackedMatrix | None]:
        found = zip(of, really(way, of), strict=True)
        return [each if weight.isfinite().all() else None for weight, each in found]

    monkeypatch.setattr(module, "pack_all", pack_all)
    model[0].weight.data[3, 4] = torch.nan
    packing = packed(model)
    assert packing.is_packed
    assert packing.num_bytes == SIZE
    with packing.in_use():
        assert model[0](torch.ones(2, 16)).isnan().any()


def test_a_model_that_is_copied_in_use_has_no_copies_yet(model):
    packing, x = packed(model), torch.ones(3, 16)
    with packing.in_use():
        other = copy.deepcopy(model)
    other[0].weight.mul_(-2)
    expected = linear(x, other[0].weight, other[0].bias)
    assert torch.equal(other[0](x), expected)
    again = packed(other)
    assert again.num_bytes == packing.num_bytes
    with again.in_use():
        torch.testing.assert_close(other[0](x), expected)
    assert "forward" not in vars(other[0])


def test_all_who_use_a_model_share_its_copies_and_the_last_one_frees_them(model):
    one, other = Packing.of(model), Packing.of(model)
    assert one is other
    assert Packing.of(nn.Sequential(*model)) is not one
    known = weakref.ref(one)
    del one, other
    gc.collect()
    assert known() is None


@pytest.mark.parametrize(("available", "fits"), [(4 * 2 * SIZE, True), (8 * SIZE - 4, False)])
def test_a_quarter_of_the_free_memory_is_enough(available, fits, model, monkeypatch):
    free = SimpleNamespace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    packing = packed(model)
    assert (packing.reason is None) is fits
    if packing.reason is not None:
        assert "too much of what is free" in packing.reason
    assert packed(model, whatever_memory=True).reason is None
    free.available = 0
    assert packed(model).reason is None  # It is there already.


def test_it_packs_once_it_would_have_saved_as_much_as_that_takes(model, monkeypatch):
    """Each forward saves half a second of each weight, and packing it takes two and a half."""
    fake_trials(monkeypatch, saves=0.5, packing=2.5)
    packing = Packing.of(model)
    for _ in range(4):
        packing.before_forward(1)
    assert not packing.packing_is_over
    again = Packing.of(model)  # A later call goes on counting.
    again.before_forward(1)
    assert again.packing_is_over
    assert again.is_packed


def test_a_prompt_counts_before_it_is_read(model, monkeypatch):
    fake_trials(monkeypatch, saves=0.5, packing=2.5)
    packing = Packing.of(model)
    packing.before_forward(8 * 4)
    assert not packing.is_packed
    packing.before_forward(8)
    assert packing.is_packed


def test_layers_are_timed_once_that_is_a_small_part_of_the_work(model, monkeypatch):
    timed = fake_trials(monkeypatch)
    monkeypatch.setattr(module, "_DUE", 10)
    packing = Packing.of(model)
    packing.before_forward(8 * 8)
    packing.before_forward(1)
    assert not timed
    packing.before_forward(1)
    assert timed == [torch.float32]


def test_where_nothing_was_faster_layers_are_timed_again_after_more_work(model, monkeypatch):
    """Another program may have been in the way of the first times. The third ones are the last."""
    timed = fake_trials(monkeypatch, pays=False)
    monkeypatch.setattr(module, "_DUE", 1)
    packing = Packing.of(model)
    for num_tries, num_forwards in enumerate((1, 7, 56), 1):
        assert not packing.packing_is_over
        packing.before_forward(8 * num_forwards)
        assert len(timed) == num_tries
    assert packing.packing_is_over
    assert packing.reason is not None


def test_later_times_may_be_better(model, monkeypatch):
    fake_trials(monkeypatch, pays=False)
    packing = packed(model)
    assert not packing.is_packed
    fake_trials(monkeypatch)
    packing.before_forward(1)
    assert packing.is_packed
    assert packing.reason is None


def others_are_as_busy(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """This process gets half of the processor; returns one number for each time that it looks."""
    looks: list[float] = []
    monkeypatch.setattr(module, "processor_share", lambda: looks.append(0.5) or 0.5)
    return looks


def test_a_busy_machine_neither_times_nor_packs_and_looks_seldom(model, monkeypatch):
    timed = fake_trials(monkeypatch)
    monkeypatch.setattr(module, "_DUE", 10)
    packing = Packing.of(model)
    with monkeypatch.context() as during:
        looks = others_are_as_busy(during)
        for num_looks, num_forwards in ((0, 9), (1, 1), (1, 9), (2, 1)):
            packing.before_forward(8 * num_forwards)
            assert (len(looks), timed, packing.packing_is_over) == (num_looks, [], False)
    packing.before_forward(8 * 9)
    assert not packing.is_packed
    packing.before_forward(8)
    assert (timed, packing.is_packed) == ([torch.float32], True)


def test_packing_waits_for_a_quiet_moment_too(model, monkeypatch):
    timed = fake_trials(monkeypatch, saves=0.5, packing=2.5)
    packing = Packing.of(model)
    packing.before_forward(1)
    assert timed
    with monkeypatch.context() as during:
        others_are_as_busy(during)
        packing.before_forward(8 * 4)
        assert not packing.is_packed
        assert Packing.of(model).pack() is None  # Who asks for it gets it.
    assert packing.is_packed


def test_a_machine_that_stays_busy_packs_after_several_times_as_much_work(model, monkeypatch):
    timed = fake_trials(monkeypatch, saves=0.5, packing=2.5)
    monkeypatch.setattr(module, "_DUE", 1)
    others_are_as_busy(monkeypatch)
    packing = Packing.of(model)
    packing.before_forward(8 * 7)
    assert not timed
    packing.before_forward(8)
    assert timed
    assert packing.is_packed


def test_packing_that_is_interrupted_stays_right_and_goes_on(model, monkeypatch):
    def interrupted(way: str, of: list[torch.Tensor]) -> list[PackedMatrix | None]:
        if of[0].shape[1] == 24:
            raise KeyboardInterrupt
        return really(way, of)

    really, x = module.pack_all, torch.ones(2, 16)
    expected = model(x)
    packing = Packing.of(model)
    with monkeypatch.context() as during:
        during.setattr(module, "_AT_ONCE", 1)
        during.setattr(module, "pack_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            packing.pack()
    assert (packing.num_bytes, packing.is_packed) == (SIZE, False)
    with packing.in_use():
        torch.testing.assert_close(model(x), expected)
    assert packed(model).is_packed


def test_what_only_looks_like_a_linear_layer_is_left_alone():
    class Special(nn.Linear):
        pass

    hooked = nn.Linear(16, 24)
    vars(hooked)["forward"] = lambda x: x
    assert copies.linears_of(nn.Sequential(Special(16, 24), hooked, nn.ReLU())) == []
    compiled = nn.Sequential(nn.Linear(16, 24))
    compiled._compiled_call_impl = lambda x: x  # type: ignore[assignment]
    assert copies.linears_of(compiled) == []


def test_it_is_used_inside_and_in_this_thread_alone(model, monkeypatch):
    monkeypatch.setattr(copies, "packed_linear", lambda x, w, b, _packed: -linear(x, w, b))
    packing, x, elsewhere = packed(model), torch.ones(1, 16), []
    right = model[0](x)
    with packing.in_use():
        assert torch.equal(model[0](x), -right)
        thread = threading.Thread(target=lambda: elsewhere.append(model[0](x)))
        thread.start()
        thread.join()
        with packing.in_use():
            assert torch.equal(model[0](x), -right)
        assert torch.equal(model[0](x), -right)
    assert torch.equal(elsewhere[0], right)
    assert torch.equal(model[0](x), right)
    assert "forward" not in vars(model[0])


def test_a_forward_that_comes_meanwhile_stays(model):
    packing = packed(model)

    def theirs(x: torch.Tensor) -> str:
        return "theirs"

    with packing.in_use():
        vars(model[0])["forward"] = theirs
    assert model[0](torch.ones(1, 16)) == "theirs"


def test_other_threads_may_look_at_the_model_meanwhile(model):
    interval, x, wrong = sys.getswitchinterval(), torch.randn(2, 16), []
    expected = model(x)
    sys.setswitchinterval(1e-6)

    def work(_index: int) -> None:
        with packed(model).in_use():
            if not torch.allclose(model(x), expected, atol=1e-5):
                wrong.append(1)

    try:
        in_threads(work, 150, 3)
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert "forward" not in vars(model[0])


def clocked(monkeypatch: pytest.MonkeyPatch, *shares: float) -> list[torch.Tensor]:
    """Packed products of one token and of several take these shares of the own ones' second."""

    def seconds(products: list[Any], inputs: list[torch.Tensor]) -> float:
        return 1.0 if products[0].func is own_linear else shares[len(inputs[0]) > 1]

    monkeypatch.setattr(module, "_seconds", seconds)
    return list(torch.randn(3, 24, 16))


def test_timing_runs_here_and_draws_nothing():
    weights, before = list(torch.randn(3, 24, 16)), torch.get_rng_state()
    found = module.product_times(weights)
    assert min(found.own) > 0
    assert found.way in ("same", None)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("shares", "way", "least", "in_place"),
    [
        ((0.5, 0.5), "same", 1, True),
        ((0.95, 0.95), None, 1, False),
        ((1.5, 0.3), "same", 2, False),  # A single token is faster as it is.
        ((1.1, 0.3), "same", 2, True),
    ],
)
def test_copies_are_used_where_they_are_faster(shares, way, least, in_place, monkeypatch):
    weights = clocked(monkeypatch, *shares)
    found = module.product_times(weights)
    assert found.way == way
    if way is None:
        return
    assert (found.least_tokens, found.suits_in_place) == (least, in_place)
    number = 3 * 24 * 16
    assert found.saved * number == pytest.approx(sum(max(1 - each, 0) for each in shares) / 2)
    copy, weight = CopySlot(), weights[0]
    copy.held = copies.SlotContent(Origin.of(weight), "copy", least)  # type: ignore[arg-type]
    assert [copy.copy_for(weight, n) is not None for n in (1, 2, 64)] == [least == 1, True, True]


def test_parts_of_large_layers_are_timed(monkeypatch):
    weights = clocked(monkeypatch, 0.5, 0.5)
    monkeypatch.setattr(module, "_SAMPLE", 16 * 8)
    monkeypatch.setattr(module, "_PARTS", 2)
    assert [part.shape for part in module._sample(weights)] == [(4, 16), (4, 16)]
    assert module.product_times(weights).own == (1 / 128, 1 / 128)
